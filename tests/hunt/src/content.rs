//! The contents of blocks: they show which block it is and of which generation. So any block that
//! is read back shows whether it is right, and if not, its real origin.
//!
//! Pure arithmetic. Every word of a block depends on its name, so no part of a wrong block can be
//! right by accident.

use std::fmt;

/// Bytes of a block: the smallest piece that direct I/O can write, so that a page has several.
pub const BLOCK_BYTES: usize = 512;
/// Words of a block.
pub const WORDS: usize = BLOCK_BYTES / 8;
/// The words of a block.
pub type Words = [u64; WORDS];

/// Bits of a generation in a name.
const GENERATION_BITS: u32 = 40;
/// Bits of a block's index in a name.
const BLOCK_BITS: u32 = 16;

/// The content of a block. A copied block keeps the name of the block that it was copied from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Content(u64);

impl Content {
    /// A hole, or the range between an old end of the file and a new one.
    pub const ZEROS: Content = Content(0);
    /// Behind the end of the file.
    pub const ABSENT: Content = Content(u64::MAX);

    /// Written as this block. Generations begin at 1, so no name is that of zeros.
    pub fn written(slot: u32, block: u32, generation: u64) -> Content {
        debug_assert!(block < 1 << BLOCK_BITS && generation > 0 && generation < 1 << GENERATION_BITS);
        Content(u64::from(slot) << (GENERATION_BITS + BLOCK_BITS) | u64::from(block) << GENERATION_BITS | generation)
    }

    /// The form in the ledger.
    pub fn raw(self) -> u64 {
        self.0
    }

    /// From the ledger.
    pub fn from_raw(raw: u64) -> Content {
        Content(raw)
    }

    /// The words of such a block in the run with that seed. A mapping shows zeros for absent
    /// blocks.
    pub fn words(self, seed: u64) -> Words {
        let mut words = [0; WORDS];
        if self == Content::ZEROS || self == Content::ABSENT {
            return words;
        }
        let mut random = fastrand::Rng::with_seed(seed ^ self.0.rotate_left(24));
        words[0] = self.0;
        words[1..].iter_mut().for_each(|word| *word = random.u64(..));
        words
    }

    /// Writes these words.
    pub fn write(self, seed: u64, block: &mut [u8]) {
        for (place, word) in block.as_chunks_mut::<8>().0.iter_mut().zip(self.words(seed)) {
            *place = word.to_le_bytes();
        }
    }
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Content::ZEROS => f.write_str("zeros"),
            Content::ABSENT => f.write_str("nothing (behind the end of the file)"),
            Content(raw) => {
                let slot = raw >> (GENERATION_BITS + BLOCK_BITS);
                let block = (raw >> GENERATION_BITS) & ((1 << BLOCK_BITS) - 1);
                write!(f, "file {slot} block {block} generation {}", raw & ((1 << GENERATION_BITS) - 1))
            }
        }
    }
}

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// The words of a block that was read.
pub fn words_of(block: &[u8]) -> Words {
    let mut words = [0; WORDS];
    for (word, bytes) in words.iter_mut().zip(block.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    words
}

/// Describes the origin of a block, as far as possible.
pub fn describe(read: &Words, seed: u64) -> String {
    if read.iter().all(|word| *word == 0) {
        return Content::ZEROS.to_string();
    }
    let begins = Content(read[0]);
    let differs = |first: Content| {
        let words = first.words(seed);
        read.iter().zip(words).position(|(found, expected)| *found != expected)
    };
    match differs(begins) {
        _ if begins == Content::ZEROS || begins == Content::ABSENT => {
            let first = read.iter().position(|word| *word != read[0]).unwrap_or(0);
            format!("a torn block: word {:#x} up to byte {}, then others", read[0], first * 8)
        }
        None => format!("all of {begins}"),
        Some(0 | 1) => format!("rubbish that begins with {:#018x} {:#018x}", read[0], read[1]),
        Some(at) if read[at..].iter().all(|word| *word == 0) => format!("{begins} up to byte {}, then zeros", at * 8),
        Some(at) => format!("{begins} up to byte {}, then something else", at * 8),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_tells_what_it_is() {
        let content = Content::written(3, 2047, 9);
        assert_eq!(content.to_string(), "file 3 block 2047 generation 9");
        assert_eq!(Content::from_raw(content.raw()), content);
        let mut block = [0; BLOCK_BYTES];
        content.write(5, &mut block);
        assert_eq!(words_of(&block), content.words(5));
        assert_eq!(describe(&words_of(&block), 5), "all of file 3 block 2047 generation 9");
        assert!(describe(&words_of(&block), 6).contains("rubbish"), "another run's");
        block[256..].fill(0);
        assert_eq!(describe(&words_of(&block), 5), "file 3 block 2047 generation 9 up to byte 256, then zeros");
        Content::written(3, 2047, 8).write(5, &mut block[..]);
        let older = words_of(&block);
        let mut torn = content.words(5);
        torn[10..].copy_from_slice(&older[10..]);
        assert!(describe(&torn, 5).contains("generation 9 up to byte 80, then something else"));
        assert_eq!(describe(&[0; WORDS], 5), "zeros");
        assert!(describe(&[u64::MAX; WORDS], 5).contains("torn"));
    }

    #[test]
    fn no_two_blocks_share_a_word() {
        let names = [Content::written(1, 2, 3), Content::written(1, 2, 4), Content::written(1, 3, 3)];
        let all: std::collections::HashSet<u64> = names.iter().flat_map(|name| name.words(1)).collect();
        assert_eq!(all.len(), names.len() * WORDS);
    }
}
