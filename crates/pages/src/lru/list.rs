//! The stack as a doubly linked list, walked from its head: the paper's baseline (MEB §3.2).
//!
//! Cost: O(distance) per reference. It exists for comparison. Nodes are in one array, linked by
//! index.

use super::{
    NONE, StackDistance,
    table::{HashTable, mix},
};

#[derive(Debug, Clone, Copy)]
struct ListNode {
    newer: u32,
    older: u32,
}

/// An LRU stack as a list.
#[derive(Debug, Clone)]
pub struct ListStack {
    index: HashTable,
    nodes: Vec<ListNode>,
    newest: u32,
}

impl ListStack {
    /// An empty stack.
    #[must_use]
    pub fn new() -> Self {
        Self { index: HashTable::new(), nodes: Vec::new(), newest: NONE }
    }

    /// Memory used, without the allocator's overhead.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.index.bytes() + self.nodes.capacity() * size_of::<ListNode>()
    }

    fn depth(&self, node: u32) -> u64 {
        let (mut at, mut depth) = (self.newest, 1);
        while at != node {
            at = self.nodes[at as usize].older;
            depth += 1;
        }
        depth
    }

    fn unlink(&mut self, node: u32) {
        let ListNode { newer, older } = self.nodes[node as usize];
        if older != NONE {
            self.nodes[older as usize].newer = newer;
        }
        match newer {
            NONE => self.newest = older,
            newer => self.nodes[newer as usize].older = older,
        }
    }

    fn push(&mut self, node: u32) {
        if self.newest != NONE {
            self.nodes[self.newest as usize].newer = node;
        }
        self.nodes[node as usize] = ListNode { newer: NONE, older: self.newest };
        self.newest = node;
    }
}

impl Default for ListStack {
    fn default() -> Self {
        Self::new()
    }
}

impl StackDistance for ListStack {
    fn touch(&mut self, id: u64) -> Option<u64> {
        let fresh = super::index_of_next(self.nodes.len());
        let node = self.index.find_or_insert(mix(id), fresh);
        let distance = (node != fresh).then(|| self.depth(node));
        match distance {
            Some(_) => self.unlink(node),
            None => self.nodes.push(ListNode { newer: NONE, older: NONE }),
        }
        self.push(node);
        distance
    }

    fn len(&self) -> usize {
        self.nodes.len()
    }
}
