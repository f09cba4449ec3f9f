//! Judges whether the bytes of a read are permitted.
//!
//! Pure logic: the ledger's answer and the bytes are the input, a judgement is the output.

use crate::content::{Content, WORDS, Words};
use crate::ledger::Allowed;

/// The visible part of a block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Seen<'a> {
    /// All of it.
    Whole(&'a Words),
    /// A piece, as the file ended within the block. Files end between blocks, except while their
    /// end moves.
    Piece,
    /// Nothing: the file ends before it.
    Nothing,
}

/// The way of the read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadMethod {
    /// By a system call, which ends at the end of the file.
    Call,
    /// By a mapping, whose last page continues with zeros behind the end.
    Mapping,
}

/// Judges one block. Words are judged separately: a read that overlaps a write may see a part of
/// each.
///
/// # Errors
/// Fails with the first wrong byte of the block (0 if its presence or absence is wrong).
pub fn judge(allowed: &Allowed, seen: &Seen, method: ReadMethod, seed: u64) -> Result<(), usize> {
    let contents = allowed.contents();
    let may_be_absent = contents.contains(&Content::ABSENT);
    let changes = contents.len() > 1;
    let read = match seen {
        Seen::Nothing if may_be_absent => return Ok(()),
        Seen::Piece if may_be_absent && changes => return Ok(()),
        Seen::Nothing | Seen::Piece => return Err(0),
        Seen::Whole(words) => *words,
    };
    // If a file grows, its new end may be visible before the bytes are, for readers at the same
    // time.
    let may_be_zeros = may_be_absent && (method == ReadMethod::Mapping || changes);
    if !may_be_zeros && contents.iter().all(|content| *content == Content::ABSENT) {
        return Err(0);
    }
    let mut right = [false; WORDS];
    let mut compare = |expected: Words| {
        right.iter_mut().zip(read).zip(expected).for_each(|((right, found), expected)| *right |= *found == expected);
    };
    // The newest first: it nearly always matches.
    for content in contents.iter().rev().filter(|content| **content != Content::ABSENT) {
        compare(content.words(seed));
    }
    if may_be_zeros {
        compare([0; WORDS]);
    }
    right.iter().position(|right| !right).map_or(Ok(()), |word| Err(word * 8))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: u64 = 7;

    fn generation(number: u64) -> Content {
        Content::written(1, 2, number)
    }

    fn judged(allowed: &[Content], seen: Seen, method: ReadMethod) -> Result<(), usize> {
        judge(&Allowed::of(allowed), &seen, method, SEED)
    }

    fn whole(content: Content) -> Words {
        content.words(SEED)
    }

    #[test]
    fn an_older_generation_is_wrong() {
        for method in [ReadMethod::Call, ReadMethod::Mapping] {
            assert_eq!(judged(&[generation(2)], Seen::Whole(&whole(generation(2))), method), Ok(()));
            assert_eq!(judged(&[generation(2)], Seen::Whole(&whole(generation(1))), method), Err(0));
            assert_eq!(judged(&[generation(2), generation(3)], Seen::Whole(&whole(generation(1))), method), Err(0));
            assert_eq!(judged(&[generation(2)], Seen::Whole(&whole(Content::written(1, 3, 2))), method), Err(0));
            assert_eq!(judged(&[generation(2)], Seen::Whole(&whole(Content::ZEROS)), method), Err(0));
            assert_eq!(judged(&[generation(2)], Seen::Nothing, method), Err(0));
        }
    }

    #[test]
    fn one_wrong_byte_is_found() {
        let mut words = generation(2).words(SEED);
        words[63] ^= 1 << 56;
        assert_eq!(judged(&[generation(2)], Seen::Whole(&words), ReadMethod::Call), Err(504));
    }

    #[test]
    fn a_read_that_meets_a_write_may_see_a_part_of_each() {
        let mut torn = generation(2).words(SEED);
        torn[32..].copy_from_slice(&generation(3).words(SEED)[32..]);
        assert_eq!(judged(&[generation(2), generation(3)], Seen::Whole(&torn), ReadMethod::Call), Ok(()));
        assert_eq!(judged(&[generation(3)], Seen::Whole(&torn), ReadMethod::Call), Err(0));
        torn[40] = 0;
        assert_eq!(judged(&[generation(2), generation(3)], Seen::Whole(&torn), ReadMethod::Call), Err(320));
        assert_eq!(
            judged(&[generation(2), Content::ZEROS, generation(3)], Seen::Whole(&torn), ReadMethod::Call),
            Ok(())
        );
    }

    #[test]
    fn behind_the_end_there_is_nothing() {
        assert_eq!(judged(&[Content::ABSENT], Seen::Nothing, ReadMethod::Call), Ok(()));
        assert_eq!(judged(&[Content::ABSENT], Seen::Whole(&whole(Content::ZEROS)), ReadMethod::Call), Err(0));
        assert_eq!(judged(&[Content::ABSENT], Seen::Whole(&whole(Content::ZEROS)), ReadMethod::Mapping), Ok(()));
        assert_eq!(judged(&[Content::ABSENT], Seen::Whole(&whole(generation(1))), ReadMethod::Mapping), Err(0));
        assert_eq!(judged(&[Content::ABSENT], Seen::Piece, ReadMethod::Call), Err(0));
        // While the file grows.
        let grows = [Content::ABSENT, generation(2)];
        for seen in
            [Seen::Nothing, Seen::Piece, Seen::Whole(&whole(Content::ZEROS)), Seen::Whole(&whole(generation(2)))]
        {
            assert_eq!(judged(&grows, seen, ReadMethod::Call), Ok(()), "{seen:?}");
        }
        assert_eq!(judged(&grows, Seen::Whole(&whole(generation(1))), ReadMethod::Call), Err(0));
    }
}
