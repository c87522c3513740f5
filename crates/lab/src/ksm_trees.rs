//! Number of page comparisons of the kernel's KSM: a model of its two trees over pages that do
//! not change.
//!
//! Linux `mm/ksm.c` keeps shared pages in a *stable* red-black tree, ordered by content. It keeps
//! candidates seen in this pass in an *unstable* tree, which it drops after the pass. A page is
//! looked up in the stable tree. If its checksum has not changed since the last pass, it is
//! looked up in the unstable tree too; on a match there, both pages move into the stable tree.
//! Each step down a tree compares two pages. Here a comparison counts as futile if the two are
//! not equal.
//!
//! The model omits pages that change while they are scanned, and smart scan, which only skips
//! pages that found no match before. It also omits the removal of a node from the unstable tree
//! when its page is shared. Such a node remains a step on the way to other nodes here; its
//! content is found in the stable tree first.

use std::cmp::Ordering;

/// Comparisons of two pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Comparisons {
    pub all: u64,
    /// Those of two pages that are not equal.
    pub futile: u64,
    /// Bytes that were read to tell pages apart: hashed, and compared up to the first difference.
    /// A comparison reads two pages, and counts once.
    pub bytes: u64,
}

impl Comparisons {
    pub fn plus(self, other: Self) -> Self {
        let Self { all, futile, bytes } = other;
        Self { all: self.all + all, futile: self.futile + futile, bytes: self.bytes + bytes }
    }

    /// Compares two pages, and counts the comparison.
    pub fn compare(&mut self, one: &[u8], other: &[u8]) -> Ordering {
        let differs = one.iter().zip(other).position(|(one, other)| one != other);
        let (read, order) = match differs {
            Some(at) => (at + 1, one[at].cmp(&other[at])),
            None => (one.len().min(other.len()), one.len().cmp(&other.len())),
        };
        self.all += 1;
        self.futile += u64::from(order != Ordering::Equal);
        self.bytes += read as u64;
        order
    }

    /// Counts a page that is hashed.
    pub fn read(&mut self, page: &[u8]) {
        self.bytes += page.len() as u64;
    }
}

/// Scans these pages `passes` times. Returns the comparisons, the number of pages that are shared
/// in the end, and the number of their contents.
pub fn scan(pages: &[&[u8]], passes: u32) -> (Comparisons, u64, u64) {
    let mut counted = Comparisons::default();
    let mut stable = Tree::default();
    let mut is_shared = vec![false; pages.len()];
    let mut shared = 0;
    for pass in 0..passes {
        let mut unstable = Tree::default();
        for at in 0..pages.len() {
            if is_shared[at] {
                continue;
            }
            if stable.find(at, pages, &mut counted).is_some() {
                is_shared[at] = true;
                shared += 1;
                continue;
            }
            // Its checksum, to be compared with that of the next pass.
            counted.read(pages[at]);
            // In the first pass no page has an earlier checksum.
            if pass == 0 {
                continue;
            }
            if let Some(twin) = unstable.find_or_insert(at, pages, &mut counted) {
                stable.find_or_insert(at, pages, &mut counted);
                shared += u64::from(!is_shared[twin]) + 1;
                (is_shared[at], is_shared[twin]) = (true, true);
            }
        }
    }
    (counted, shared, stable.nodes.len() as u64)
}

const NONE: usize = usize::MAX;
const LEFT: usize = 0;
const RIGHT: usize = 1;

#[derive(Clone, Copy, Debug)]
struct TreeNode {
    page: usize,
    parent: usize,
    children: [usize; 2],
    is_red: bool,
}

/// A red-black tree, which balances itself like the kernel's when a node is added.
#[derive(Debug)]
struct Tree {
    root: usize,
    nodes: Vec<TreeNode>,
}

impl Default for Tree {
    fn default() -> Self {
        Self { root: NONE, nodes: Vec::new() }
    }
}

impl Tree {
    /// The node with this content, or the node and the side at which it would be inserted.
    fn seek(
        &self,
        at: usize,
        pages: &[&[u8]],
        counted: &mut Comparisons,
    ) -> Result<usize, (usize, usize)> {
        let (mut node, mut last) = (self.root, (NONE, LEFT));
        while node != NONE {
            let found = &self.nodes[node];
            let side = match counted.compare(pages[at], pages[found.page]) {
                Ordering::Equal => return Ok(node),
                Ordering::Less => LEFT,
                Ordering::Greater => RIGHT,
            };
            last = (node, side);
            node = found.children[side];
        }
        Err(last)
    }

    /// The page with the same content.
    fn find(&self, at: usize, pages: &[&[u8]], counted: &mut Comparisons) -> Option<usize> {
        self.seek(at, pages, counted).ok().map(|node| self.nodes[node].page)
    }

    /// The page with the same content. `None`: there was none, and this page was inserted.
    fn find_or_insert(
        &mut self,
        at: usize,
        pages: &[&[u8]],
        counted: &mut Comparisons,
    ) -> Option<usize> {
        match self.seek(at, pages, counted) {
            Ok(node) => Some(self.nodes[node].page),
            Err((parent, side)) => {
                self.insert(at, parent, side);
                None
            }
        }
    }

    fn insert(&mut self, page: usize, parent: usize, side: usize) {
        let node = self.nodes.len();
        self.nodes.push(TreeNode { page, parent, children: [NONE; 2], is_red: true });
        match self.nodes.get_mut(parent) {
            Some(parent) => parent.children[side] = node,
            None => self.root = node,
        }
        self.balance(node);
    }

    /// Restores the invariant after a red node was added: no red node has a red parent.
    fn balance(&mut self, mut node: usize) {
        loop {
            let parent = self.nodes[node].parent;
            if parent == NONE {
                self.nodes[node].is_red = false;
                return;
            }
            if !self.nodes[parent].is_red {
                return;
            }
            // A red node has a parent: the root is black.
            let grand = self.nodes[parent].parent;
            let side = self.side(parent);
            let uncle = self.nodes[grand].children[1 - side];
            if uncle != NONE && self.nodes[uncle].is_red {
                self.nodes[parent].is_red = false;
                self.nodes[uncle].is_red = false;
                self.nodes[grand].is_red = true;
                node = grand;
                continue;
            }
            let mut upper = parent;
            if self.side(node) != side {
                self.rotate(parent, side);
                upper = node;
            }
            self.nodes[upper].is_red = false;
            self.nodes[grand].is_red = true;
            self.rotate(grand, 1 - side);
            return;
        }
    }

    /// The side of its parent on which the node is.
    fn side(&self, node: usize) -> usize {
        let parent = self.nodes[node].parent;
        usize::from(self.nodes[parent].children[RIGHT] == node)
    }

    /// Rotates the node down to `side`; its child on the other side takes its place.
    fn rotate(&mut self, node: usize, side: usize) {
        let (parent, child) = (self.nodes[node].parent, self.nodes[node].children[1 - side]);
        let inner = self.nodes[child].children[side];
        self.nodes[node].children[1 - side] = inner;
        if inner != NONE {
            self.nodes[inner].parent = node;
        }
        match parent {
            NONE => self.root = child,
            _ => {
                let at = self.side(node);
                self.nodes[parent].children[at] = child;
            }
        }
        self.nodes[child].parent = parent;
        self.nodes[child].children[side] = node;
        self.nodes[node].parent = child;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(contents: &[u16]) -> Vec<[u8; 64]> {
        let page = |content: &u16| {
            let mut page = [0; 64];
            page[32..34].copy_from_slice(&content.to_be_bytes());
            page
        };
        contents.iter().map(page).collect()
    }

    fn scanned(contents: &[u16], passes: u32) -> (Comparisons, u64, u64) {
        let pages = pages(contents);
        scan(&pages.iter().map(|page| &page[..]).collect::<Vec<_>>(), passes)
    }

    #[test]
    fn what_is_equal_is_shared_in_the_second_pass() {
        assert_eq!(scanned(&[1, 2, 1, 3, 2, 1], 1).1, 0);
        let (_, shared, contents) = scanned(&[1, 2, 1, 3, 2, 1], 2);
        assert_eq!((shared, contents), (5, 2));
    }

    #[test]
    fn bytes_are_those_hashed_and_those_compared_up_to_the_first_difference() {
        let mut counted = Comparisons::default();
        assert_eq!(counted.compare(&[1, 2, 3, 4], &[1, 2, 9, 4]), Ordering::Less);
        assert_eq!((counted.futile, counted.bytes), (1, 3));
        assert_eq!(counted.compare(&[1, 2, 3, 4], &[1, 2, 3, 4]), Ordering::Equal);
        assert_eq!((counted.all, counted.futile, counted.bytes), (2, 1, 7));
        // The first pass has no comparison, and a checksum of each page of 64 bytes.
        assert_eq!(scanned(&[1, 2, 1], 1).0, Comparisons { bytes: 3 * 64, ..Default::default() });
    }

    #[test]
    fn a_page_is_compared_with_as_many_as_the_tree_is_deep() {
        // Ascending order degrades a tree that is not balanced.
        let all: Vec<u16> = (0..4096).collect();
        let (counted, shared, _) = scanned(&all, 2);
        assert_eq!((shared, counted.all), (0, counted.futile));
        let each = counted.all as f64 / 4096.0;
        assert!((9.0..22.0).contains(&each), "{each}");
    }

    #[test]
    fn the_tree_is_red_and_black_as_it_ought_to_be() {
        let mut random = crate::random::Random::new(7);
        let contents: Vec<u16> =
            (0..3000).map(|_| u16::try_from(random.between(0, 9999)).unwrap()).collect();
        let pages = pages(&contents);
        let pages: Vec<&[u8]> = pages.iter().map(|page| &page[..]).collect();
        let (mut tree, mut counted) = (Tree::default(), Comparisons::default());
        for at in 0..pages.len() {
            tree.find_or_insert(at, &pages, &mut counted);
        }
        assert!((0..pages.len()).all(|at| tree.find(at, &pages, &mut counted).is_some()));
        black_height(&tree, tree.root, false);
    }

    /// The number of black nodes on each path down, which must be equal on all.
    fn black_height(tree: &Tree, node: usize, is_parent_red: bool) -> u32 {
        let Some(found) = tree.nodes.get(node) else { return 0 };
        assert!(!(is_parent_red && found.is_red));
        let [left, right] = found.children.map(|child| black_height(tree, child, found.is_red));
        assert_eq!(left, right);
        left + u32::from(!found.is_red)
    }
}
