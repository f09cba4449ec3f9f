//! The contents of the probe's pages: they show which page it is and of which generation. So any
//! page that is read back shows whether it is right, and if not, its real origin: an older
//! generation, another page, or rubbish.
//!
//! Pure arithmetic. The whole page depends on its name and generation, so no part of it can be
//! right by accident.

use page::{PAGE_SIZE, Page};

/// Odd, with its bits well mixed (2⁶⁴ divided by the golden ratio).
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Bytes of a word of content.
const WORD_BYTES: usize = 8;

/// The name of a page of the probe's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name {
    /// The seed of the files: another run has other contents.
    pub seed: u64,
    /// Number of the file.
    pub file: u32,
    /// The page's index in it.
    pub index: u32,
}

fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 32)).wrapping_mul(GOLDEN);
    word = (word ^ (word >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word ^ (word >> 32)
}

impl Name {
    fn words(self, generation: u32) -> impl Iterator<Item = u64> {
        let place = u64::from(self.file) << 32 | u64::from(self.index);
        let base = mix(self.seed ^ mix(place) ^ mix(u64::from(generation) + 1));
        let head = [place, u64::from(generation) << 32 | (base & 0xffff_ffff)];
        let rest = (head.len()..PAGE_SIZE / WORD_BYTES)
            .map(move |at| mix(base.wrapping_add((at as u64).wrapping_mul(GOLDEN))));
        head.into_iter().chain(rest)
    }

    /// Writes the page's content of a generation.
    pub fn write(self, generation: u32, page: &mut Page) {
        let (places, _) = page.as_chunks_mut::<WORD_BYTES>();
        for (place, word) in places.iter_mut().zip(self.words(generation)) {
            *place = word.to_le_bytes();
        }
    }

    /// Compares the bytes of a read with the content of a generation. `Some`: a description of the
    /// difference.
    pub fn compare(self, generation: u32, read: &[u8]) -> Option<String> {
        if read.len() != PAGE_SIZE {
            return Some(format!("{} bytes instead of a page", read.len()));
        }
        let (words, _) = read.as_chunks::<WORD_BYTES>();
        let differs = |(at, (word, expected)): (usize, (&[u8; WORD_BYTES], u64))| {
            (*word != expected.to_le_bytes()).then_some(at * WORD_BYTES)
        };
        let wrong: Vec<usize> = words.iter().zip(self.words(generation)).enumerate().filter_map(differs).collect();
        let (first, last) = (wrong.first()?, wrong.last()?);
        Some(format!(
            "{} of {} words differ, from byte {first} to {}: expected generation {generation}, found {}",
            wrong.len(),
            words.len(),
            last + WORD_BYTES,
            self.describe(read),
        ))
    }

    /// Describes the origin of a page, as far as possible.
    fn describe(self, read: &[u8]) -> String {
        if read.iter().all(|byte| *byte == 0) {
            return "zeros".to_owned();
        }
        let word = |at: usize| read[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let (place, stamp) = (word(0), word(WORD_BYTES));
        let other = Name { seed: self.seed, file: (place >> 32) as u32, index: place as u32 };
        let generation = (stamp >> 32) as u32;
        let whole = other.words(generation).zip(read.as_chunks::<WORD_BYTES>().0).all(|(e, f)| e.to_le_bytes() == *f);
        let what = if whole { "all of" } else { "a page that begins as" };
        format!("{what} file {} page {} generation {generation}", other.file, other.index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_is_wrong_is_named() {
        let name = Name { seed: 5, file: 2, index: 77 };
        let mut page = [0; PAGE_SIZE];
        name.write(3, &mut page);
        assert_eq!(name.compare(3, &page), None);
        assert!(name.compare(4, &page).unwrap().ends_with("found all of file 2 page 77 generation 3"));
        let other = Name { index: 78, ..name };
        assert!(other.compare(3, &page).unwrap().contains("all of file 2 page 77"));
        assert!(Name { seed: 6, ..name }.compare(3, &page).is_some());
        page[4095] ^= 1;
        let wrong = name.compare(3, &page).unwrap();
        assert!(wrong.starts_with("1 of 512 words differ, from byte 4088 to 4096"), "{wrong}");
        assert!(wrong.contains("begins as"), "{wrong}");
        assert!(name.compare(3, &[0; PAGE_SIZE]).unwrap().ends_with("zeros"));
        assert!(name.compare(3, &[0; 17]).unwrap().contains("17 bytes"));
    }
}
