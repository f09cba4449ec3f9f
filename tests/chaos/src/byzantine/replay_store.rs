//! The byzantine lender's replay store: every version of every page that it ever received, as long
//! as there is room, across sessions. This makes its lies convincing.

use page::Page;
use std::collections::{HashMap, VecDeque};
use wire::{PutItem, WireKey};

/// Stored contents: 48 MiB.
const CONTENTS_MAX: usize = 12_288;

/// Stored contents of one page.
const VERSIONS_MAX: usize = 4;

/// One content that a borrower has put.
#[derive(Clone)]
pub struct Content {
    /// Its name.
    pub key: WireKey,
    /// The checksum that the borrower sent.
    pub checksum: u64,
    /// Its bytes.
    pub page: Box<Page>,
}

/// All contents, by page.
#[derive(Default)]
pub struct ReplayStore {
    pages: HashMap<(u32, u32), VecDeque<Content>>,
    /// The same pages in the order of their first put, the oldest first.
    order: VecDeque<(u32, u32)>,
    count: usize,
}

impl ReplayStore {
    /// Stores a content; removes others if there is no room.
    pub fn keep(&mut self, item: &PutItem, page: &Page) {
        let place = (item.key.file.get(), item.key.index.get());
        let contents = self.pages.entry(place).or_default();
        if contents.is_empty() {
            self.order.push_back(place);
        }
        contents.push_back(Content { key: item.key, checksum: item.checksum.get(), page: Box::new(*page) });
        self.count += 1;
        if contents.len() > VERSIONS_MAX {
            contents.pop_front();
            self.count -= 1;
        }
        while self.count > CONTENTS_MAX {
            let Some(oldest) = self.order.pop_front() else { break };
            self.count -= self.pages.remove(&oldest).map_or(0, |contents| contents.len());
        }
    }

    /// The content with that name.
    pub fn exact(&self, key: &WireKey) -> Option<&Content> {
        self.versions(key).find(|content| content.key == *key)
    }

    /// Every content of that page, of any version.
    pub fn versions(&self, key: &WireKey) -> impl Iterator<Item = &Content> {
        self.pages.get(&(key.file.get(), key.index.get())).into_iter().flatten()
    }

    /// Some content of some page.
    pub fn any(&self, random: &mut fastrand::Rng) -> Option<&Content> {
        let place = self.order.get(random.usize(..self.order.len().max(1)))?;
        self.pages.get(place)?.back()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use page::{FileKey, PAGE_SIZE, PageId, Version};

    fn item(index: u32, version: u64) -> PutItem {
        PutItem { key: WireKey::new(PageId { file: FileKey(1), index }, Version(version)), checksum: version.into() }
    }

    #[test]
    fn it_keeps_old_versions_and_is_bounded() {
        let mut replay_store = ReplayStore::default();
        for version in 1..=9 {
            replay_store.keep(&item(7, version), &[version as u8; PAGE_SIZE]);
        }
        assert_eq!(replay_store.versions(&item(7, 1).key).count(), VERSIONS_MAX);
        assert_eq!(replay_store.exact(&item(7, 9).key).unwrap().page[0], 9);
        assert!(replay_store.exact(&item(7, 1).key).is_none());
        for index in 100..100 + CONTENTS_MAX as u32 + 10 {
            replay_store.keep(&item(index, 1), &[0; PAGE_SIZE]);
        }
        assert!(replay_store.count <= CONTENTS_MAX);
        assert_eq!(replay_store.versions(&item(7, 1).key).count(), 0);
        assert_eq!(replay_store.order.len(), replay_store.pages.len());
    }
}
