//! The stack as an AVL tree, ordered by the time of the last touch; each node has the size of its
//! subtree. This is the paper's structure ("ABL", MEB §3.2).
//!
//! A reference descends to its node and adds up the later subtrees on the way (the distance).
//! Then it removes the node and inserts it again as the latest. Nodes are in one array, linked by
//! index.
//!
//! Invariants: in order, times ascend; a node's children differ in height by at most one. Cost:
//! O(log N) per reference, some 60 bytes per id with the table. Source: Adelson-Velsky & Landis
//! 1962; Almási et al. 2002 for stack distances.

use super::{
    NONE, StackDistance,
    table::{HashTable, mix},
};

#[derive(Debug, Clone, Copy)]
struct Node {
    time: u64,
    left: u32,
    right: u32,
    size: u32,
    height: u32,
}

/// An LRU stack as a balanced tree.
#[derive(Debug, Clone)]
pub struct AvlStack {
    index: HashTable,
    nodes: Vec<Node>,
    root: u32,
    now: u64,
}

impl AvlStack {
    /// An empty stack.
    #[must_use]
    pub fn new() -> Self {
        Self { index: HashTable::new(), nodes: Vec::new(), root: NONE, now: 0 }
    }

    /// Memory used, without the allocator's overhead.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.index.bytes() + self.nodes.capacity() * size_of::<Node>()
    }

    fn node(&self, node: u32) -> Option<&Node> {
        self.nodes.get(node as usize)
    }

    fn size(&self, node: u32) -> u32 {
        self.node(node).map_or(0, |node| node.size)
    }

    fn height(&self, node: u32) -> u32 {
        self.node(node).map_or(0, |node| node.height)
    }

    /// The number of nodes whose time is `time` or later.
    fn not_earlier(&self, time: u64) -> u64 {
        let (mut at, mut count) = (self.root, 0);
        while let Some(node) = self.node(at) {
            if node.time < time {
                at = node.right;
            } else {
                count += u64::from(self.size(node.right)) + 1;
                at = node.left;
            }
        }
        count
    }

    /// Recomputes the size and height of `node` from its children.
    fn update(&mut self, node: u32) {
        let Node { left, right, .. } = self.nodes[node as usize];
        let size = self.size(left) + self.size(right) + 1;
        let height = self.height(left).max(self.height(right)) + 1;
        let node = &mut self.nodes[node as usize];
        (node.size, node.height) = (size, height);
    }

    /// Rotates the left child up into `node`'s place; returns that child.
    fn rotate_right(&mut self, node: u32) -> u32 {
        let up = self.nodes[node as usize].left;
        self.nodes[node as usize].left = self.nodes[up as usize].right;
        self.nodes[up as usize].right = node;
        self.update(node);
        self.update(up);
        up
    }

    /// Rotates the right child up into `node`'s place; returns that child.
    fn rotate_left(&mut self, node: u32) -> u32 {
        let up = self.nodes[node as usize].right;
        self.nodes[node as usize].right = self.nodes[up as usize].left;
        self.nodes[up as usize].left = node;
        self.update(node);
        self.update(up);
        up
    }

    /// Balances a subtree whose children are balanced; returns its root.
    fn balance(&mut self, node: u32) -> u32 {
        self.update(node);
        let Node { left, right, .. } = self.nodes[node as usize];
        if self.height(left) > self.height(right) + 1 {
            let Node { left: outer, right: inner, .. } = self.nodes[left as usize];
            if self.height(inner) > self.height(outer) {
                self.nodes[node as usize].left = self.rotate_left(left);
            }
            return self.rotate_right(node);
        }
        if self.height(right) > self.height(left) + 1 {
            let Node { left: inner, right: outer, .. } = self.nodes[right as usize];
            if self.height(inner) > self.height(outer) {
                self.nodes[node as usize].right = self.rotate_right(right);
            }
            return self.rotate_left(node);
        }
        node
    }

    /// Inserts `fresh` as the latest node of a subtree; returns its root.
    fn insert_latest(&mut self, root: u32, fresh: u32) -> u32 {
        if root == NONE {
            return fresh;
        }
        let right = self.nodes[root as usize].right;
        self.nodes[root as usize].right = self.insert_latest(right, fresh);
        self.balance(root)
    }

    /// Removes the node of `time` from a subtree; returns its root.
    fn remove(&mut self, root: u32, time: u64) -> u32 {
        let Node { time: here, left, right, .. } = self.nodes[root as usize];
        if time < here {
            self.nodes[root as usize].left = self.remove(left, time);
        } else if time > here {
            self.nodes[root as usize].right = self.remove(right, time);
        } else if left == NONE || right == NONE {
            return if left == NONE { right } else { left };
        } else {
            let (first, rest) = self.remove_first(right);
            let next = &mut self.nodes[first as usize];
            (next.left, next.right) = (left, rest);
            return self.balance(first);
        }
        self.balance(root)
    }

    /// Removes the earliest node of a subtree; returns it and the subtree's root.
    fn remove_first(&mut self, root: u32) -> (u32, u32) {
        let Node { left, right, .. } = self.nodes[root as usize];
        if left == NONE {
            return (root, right);
        }
        let (first, rest) = self.remove_first(left);
        self.nodes[root as usize].left = rest;
        (first, self.balance(root))
    }
}

impl Default for AvlStack {
    fn default() -> Self {
        Self::new()
    }
}

impl StackDistance for AvlStack {
    fn touch(&mut self, id: u64) -> Option<u64> {
        let latest = Node { time: self.now, left: NONE, right: NONE, size: 1, height: 1 };
        self.now += 1;
        let fresh = super::index_of_next(self.nodes.len());
        let node = self.index.find_or_insert(mix(id), fresh);
        let distance = if node == fresh {
            self.nodes.push(latest);
            None
        } else {
            let time = self.nodes[node as usize].time;
            let distance = self.not_earlier(time);
            self.root = self.remove(self.root, time);
            self.nodes[node as usize] = latest;
            Some(distance)
        };
        self.root = self.insert_latest(self.root, node);
        distance
    }

    fn len(&self) -> usize {
        self.nodes.len()
    }
}
