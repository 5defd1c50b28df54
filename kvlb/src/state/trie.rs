//! Which endpoint was sent which text: the memory of whole prompts, by which prompts that begin alike come together also
//! where no engine announces blocks.
//!
//! A radix tree of bytes. Each node has the bytes by which it goes on from its parent, and the endpoints that texts running
//! through it were sent to last. Bounded in nodes and in bytes: what was used longest ago goes. A text that is used uses
//! every node on its way, the last one first, so that no node is ever used before one below it; hence the one used longest
//! ago is always a leaf, and nothing is searched to make room. Looking a text up shares its lock with others.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;

use super::live::EndpointId;
use super::recency::Recency;

/// Nodes of one rule's tree: eight times LoxiLB's.
const NODES_MAX: usize = 64 << 10;
/// Bytes of one rule's tree. A token of English has some four bytes, so that is the text of eight million tokens: engines
/// have room for a tenth or so of that in their caches.
const BYTES_MAX: usize = 32 << 20;
/// Bytes that a node takes besides its own text: itself, its place in the order of use, its place in its parent's list, and
/// what the allocator adds.
const NODE_BYTES: usize = 160;
/// Endpoints that a node remembers: a prefix that more have is everywhere.
const HOLDERS_MAX: usize = 4;
/// The node that all texts begin at; it is always there.
const ROOT: u32 = 0;

/// One rule's memory of prompts.
#[derive(Debug)]
pub struct Trie {
    tree: RwLock<Tree>,
    evicted: AtomicU64,
}

/// What a [`Trie`] has and has done, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrieUse {
    /// Nodes.
    pub nodes: usize,
    /// Bytes.
    pub bytes: usize,
    /// Nodes that went for want of room.
    pub evicted: u64,
}

/// A beginning of a text that endpoints were sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Its bytes.
    pub matched: usize,
    /// The endpoints, the last one first.
    pub holders: Vec<EndpointId>,
}

#[derive(Debug)]
struct Tree {
    nodes: Vec<Node>,
    free: Vec<u32>,
    recency: Recency,
    /// Bytes of all nodes but the root.
    bytes: usize,
    nodes_max: usize,
    bytes_max: usize,
}

#[derive(Debug, Default)]
struct Node {
    parent: u32,
    label: Box<[u8]>,
    /// By the first byte of their label, in its order.
    children: Vec<(u8, u32)>,
    holders: Holders,
}

/// The endpoints of a node, the last one first.
#[derive(Clone, Copy, Debug, Default)]
struct Holders([Option<EndpointId>; HOLDERS_MAX]);

impl Holders {
    fn iter(&self) -> impl Iterator<Item = EndpointId> {
        self.0.iter().flatten().copied()
    }

    fn put_first(&mut self, endpoint: EndpointId) {
        let rest = self.iter().filter(|other| *other != endpoint).take(HOLDERS_MAX - 1);
        *self = std::iter::once(endpoint).chain(rest).collect();
    }

    fn retain(&mut self, stays: impl Fn(EndpointId) -> bool) {
        *self = self.iter().filter(|endpoint| stays(*endpoint)).collect();
    }

    fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }
}

impl FromIterator<EndpointId> for Holders {
    fn from_iter<I: IntoIterator<Item = EndpointId>>(endpoints: I) -> Self {
        let mut endpoints = endpoints.into_iter();
        Self(std::array::from_fn(|_| endpoints.next()))
    }
}

impl Default for Trie {
    fn default() -> Self {
        Self::with_room_for(NODES_MAX, BYTES_MAX)
    }
}

impl Trie {
    fn with_room_for(nodes_max: usize, bytes_max: usize) -> Self {
        Self { tree: RwLock::new(Tree::new(nodes_max, bytes_max)), evicted: AtomicU64::new(0) }
    }

    /// The beginnings of a text that are known, the longest first, as far as they have at least so many bytes.
    pub fn find(&self, text: &[u8], least: usize) -> Vec<Step> {
        self.tree.read().find(text, least)
    }

    /// A text is sent to an endpoint.
    pub fn learn(&self, text: &[u8], endpoint: EndpointId) {
        let mut tree = self.tree.write();
        tree.learn(text, endpoint);
        let evicted = tree.make_room();
        drop(tree);
        self.evicted.fetch_add(evicted, Ordering::Relaxed);
    }

    /// A text did not get to an endpoint after all.
    pub fn unlearn(&self, text: &[u8], endpoint: EndpointId) {
        self.tree.write().unlearn(text, endpoint);
    }

    /// Forgets endpoints that are none of these.
    pub fn retain(&self, endpoints: &[EndpointId]) {
        self.tree.write().retain(endpoints);
    }

    /// Forgets everything.
    pub fn clear(&self) {
        let mut tree = self.tree.write();
        let empty = Tree::new(tree.nodes_max, tree.bytes_max);
        let forgotten = std::mem::replace(&mut *tree, empty);
        drop(tree);
        drop(forgotten);
    }

    /// What it has and has done.
    pub fn usage(&self) -> TrieUse {
        let tree = self.tree.read();
        TrieUse { nodes: tree.len(), bytes: tree.bytes, evicted: self.evicted.load(Ordering::Relaxed) }
    }
}

impl Tree {
    fn new(nodes_max: usize, bytes_max: usize) -> Self {
        Self {
            nodes: vec![Node::default()],
            free: Vec::new(),
            recency: Recency::default(),
            bytes: 0,
            nodes_max,
            bytes_max,
        }
    }

    /// Nodes, without the root.
    fn len(&self) -> usize {
        self.nodes.len() - self.free.len() - 1
    }

    fn find(&self, text: &[u8], least: usize) -> Vec<Step> {
        let (mut at, mut matched) = (ROOT, 0);
        let mut steps = Vec::new();
        while let Some(child) = text.get(matched).and_then(|first| self.child(at, *first)) {
            let node = &self.nodes[child as usize];
            let shared = shared(&node.label, &text[matched..]);
            matched += shared;
            if matched >= least && !node.holders.is_empty() {
                steps.push(Step { matched, holders: node.holders.iter().collect() });
            }
            if shared < node.label.len() {
                break;
            }
            at = child;
        }
        steps.reverse();
        steps
    }

    fn learn(&mut self, text: &[u8], endpoint: EndpointId) {
        let (mut at, mut rest) = (ROOT, text);
        while let Some(first) = rest.first() {
            let Some(child) = self.child(at, *first) else {
                at = self.add(at, rest, Holders::default());
                break;
            };
            let shared = shared(&self.nodes[child as usize].label, rest);
            at = if shared < self.nodes[child as usize].label.len() { self.split(child, shared) } else { child };
            rest = &rest[shared..];
        }
        while at != ROOT {
            self.recency.touch(at);
            let node = &mut self.nodes[at as usize];
            node.holders.put_first(endpoint);
            at = node.parent;
        }
    }

    fn unlearn(&mut self, text: &[u8], endpoint: EndpointId) {
        let (mut at, mut rest) = (ROOT, text);
        while let Some(child) = rest.first().and_then(|first| self.child(at, *first)) {
            let node = &mut self.nodes[child as usize];
            let Some(behind) = rest.strip_prefix(&*node.label) else { break };
            node.holders.retain(|other| other != endpoint);
            (at, rest) = (child, behind);
        }
        self.prune(at);
    }

    fn retain(&mut self, endpoints: &[EndpointId]) {
        let mut leaves = Vec::new();
        for (place, node) in (0_u32..).zip(&mut self.nodes).skip(1) {
            node.holders.retain(|endpoint| endpoints.contains(&endpoint));
            // Places that are free have no text.
            if node.children.is_empty() && !node.label.is_empty() {
                leaves.push(place);
            }
        }
        for leaf in leaves {
            self.prune(leaf);
        }
    }

    /// Removes what nobody holds, from a node upwards.
    fn prune(&mut self, mut at: u32) {
        while at != ROOT && self.nodes[at as usize].children.is_empty() && self.nodes[at as usize].holders.is_empty() {
            let parent = self.nodes[at as usize].parent;
            self.remove(at);
            at = parent;
        }
    }

    /// Removes what is too much, and says how many nodes that were.
    fn make_room(&mut self) -> u64 {
        let mut removed = 0;
        while self.len() > self.nodes_max || self.bytes > self.bytes_max {
            let Some(oldest) = self.recency.oldest() else { break };
            self.remove(oldest);
            removed += 1;
        }
        removed
    }

    fn child(&self, at: u32, first: u8) -> Option<u32> {
        let children = &self.nodes[at as usize].children;
        let place = children.binary_search_by_key(&first, |(byte, _)| *byte).ok()?;
        Some(children[place].1)
    }

    /// A new leaf.
    fn add(&mut self, parent: u32, label: &[u8], holders: Holders) -> u32 {
        let node = Node { parent, label: label.into(), children: Vec::new(), holders };
        let place = self.place(node);
        self.recency.add(place);
        self.adopt(parent, label[0], place);
        place
    }

    /// Puts a node in the middle of the way to another, and gives it.
    fn split(&mut self, lower: u32, at: usize) -> u32 {
        let node = &mut self.nodes[lower as usize];
        let (above, below): (Box<[u8]>, Box<[u8]>) = (node.label[..at].into(), node.label[at..].into());
        let (parent, holders, byte) = (node.parent, node.holders, below[0]);
        self.bytes -= node.label.len();
        self.bytes += below.len();
        node.label = below;
        let first = above[0];
        let upper = self.place(Node { parent, label: above, children: vec![(byte, lower)], holders });
        self.nodes[lower as usize].parent = upper;
        self.recency.add(upper);
        self.adopt(parent, first, upper);
        upper
    }

    /// Room for a node.
    fn place(&mut self, node: Node) -> u32 {
        self.bytes += node.label.len() + NODE_BYTES;
        if let Some(place) = self.free.pop() {
            self.nodes[place as usize] = node;
            return place;
        }
        self.nodes.push(node);
        u32::try_from(self.nodes.len() - 1).unwrap_or(u32::MAX)
    }

    /// Makes a node the child that begins so, also in place of another.
    fn adopt(&mut self, parent: u32, first: u8, child: u32) {
        let children = &mut self.nodes[parent as usize].children;
        match children.binary_search_by_key(&first, |(byte, _)| *byte) {
            Ok(place) => children[place].1 = child,
            Err(place) => children.insert(place, (first, child)),
        }
    }

    fn remove(&mut self, leaf: u32) {
        let node = std::mem::take(&mut self.nodes[leaf as usize]);
        debug_assert!(node.children.is_empty(), "only leaves go");
        self.bytes -= node.label.len() + NODE_BYTES;
        let siblings = &mut self.nodes[node.parent as usize].children;
        siblings.retain(|(_, child)| *child != leaf);
        self.recency.remove(leaf);
        self.free.push(leaf);
        if self.len() == 0 {
            *self = Self::new(self.nodes_max, self.bytes_max);
        }
    }

    /// A node is used before all that are below it, and the sums are right.
    #[cfg(test)]
    fn check_invariants(&self) {
        let nodes = || self.nodes.iter().enumerate().skip(1).filter(|(_, node)| !node.label.is_empty());
        assert_eq!(nodes().count(), self.len());
        assert_eq!(nodes().map(|(_, node)| node.label.len() + NODE_BYTES).sum::<usize>(), self.bytes);
        for (place, node) in nodes() {
            let place = u32::try_from(place).unwrap();
            assert_eq!(self.child(node.parent, node.label[0]), Some(place));
        }
        let (mut order, mut rest) = (Vec::new(), self.recency.clone());
        while let Some(oldest) = rest.oldest() {
            rest.remove(oldest);
            assert!(!order.contains(&self.nodes[oldest as usize].parent), "a parent was used before its child");
            order.push(oldest);
        }
        assert_eq!(order.len(), self.len());
    }
}

/// Bytes that two texts begin with alike.
fn shared(one: &[u8], other: &[u8]) -> usize {
    const WIDE: usize = 32;
    let most = one.len().min(other.len());
    let whole = one.chunks_exact(WIDE).zip(other.chunks_exact(WIDE)).take_while(|(a, b)| a == b).count() * WIDE;
    whole + one[whole..most].iter().zip(&other[whole..most]).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests;
