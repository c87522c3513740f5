use proptest::{collection::vec, prelude::*};

use super::*;

/// A page determined by two small numbers, so that some pages are equal and some of one class.
fn page(class: u8, rest: u8) -> Page {
    let mut page = [0; PAGE_LEN];
    page[1024] = class;
    page[8] = rest;
    page
}

/// Pages, and whether each is code.
fn pages() -> impl Strategy<Value = Vec<(u8, u8, bool)>> {
    vec((0_u8..4, 0_u8..6, any::<bool>()), 0..60)
}

fn built(pages: &[(u8, u8, bool)]) -> Builder {
    let mut builder = Builder::new(Sampling::default());
    for (class, rest, is_code) in pages {
        builder.add(&page(*class, *rest), *is_code).unwrap();
    }
    builder
}

fn bytes(pages: &[(u8, u8, bool)]) -> Vec<u8> {
    built(pages).finish().to_bytes("a name").unwrap()
}

/// The bytes with checksums that match them.
fn resealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let records = xxhash_rust::xxh3::xxh3_64(&bytes[HEADER_LEN..]);
    bytes[112..120].copy_from_slice(&records.to_le_bytes());
    let header = xxhash_rust::xxh3::xxh3_64(&bytes[..120]);
    bytes[120..128].copy_from_slice(&header.to_le_bytes());
    bytes
}

proptest! {
    #[test]
    fn what_is_written_is_read(pages in pages()) {
        let table = built(&pages).finish();
        let bytes = table.to_bytes("näme").unwrap();
        let read = TableRef::parse(&bytes).unwrap();
        prop_assert_eq!(read.name(), "näme");
        prop_assert_eq!(read.records().collect::<Vec<_>>(), table.records());
        prop_assert_eq!(read.len(), table.records().len());
        let zeros = pages.iter().filter(|(class, rest, _)| (*class, *rest) == (0, 0)).count();
        prop_assert_eq!(read.zero_pages(), zeros as u64);
        prop_assert_eq!(read.pages(), (pages.len() - zeros) as u64);
    }

    #[test]
    fn neither_order_nor_threads_show(pages in pages(), cut in 0_usize..60) {
        let (mut first, mut second) = (pages.clone(), Vec::new());
        first.reverse();
        second.extend(first.drain(cut.min(first.len())..));
        let mut merged = built(&second);
        let mut other = built(&first);
        merged.merge(&mut other).unwrap();
        prop_assert!(other.is_empty());
        prop_assert_eq!(merged.finish(), built(&pages).finish());
    }

    #[test]
    fn any_changed_bit_is_found(pages in pages(), at in any::<prop::sample::Index>(), bit in 0_u8..8) {
        let mut bytes = bytes(&pages);
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        prop_assert!(TableRef::parse(&bytes).is_err());
    }

    #[test]
    fn any_cut_is_found(pages in pages(), at in any::<prop::sample::Index>()) {
        let bytes = bytes(&pages);
        prop_assert!(TableRef::parse(&bytes[..at.index(bytes.len())]).is_err());
    }

    #[test]
    fn what_is_sealed_and_wrong_never_panics(
        pages in pages(), at in any::<prop::sample::Index>(), byte in any::<u8>()
    ) {
        let mut bytes = bytes(&pages);
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if let Ok(table) = TableRef::parse(&resealed(bytes)) {
            let keys: Vec<_> = table.records().map(|r| (r.sampled, r.hash)).collect();
            prop_assert!(keys.is_sorted_by(|a, b| a < b));
        }
    }

    #[test]
    fn a_mix_is_what_counting_gives(a in pages(), b in pages(), m in 0_u32..4, n in 0_u32..4) {
        let mut copies = std::collections::BTreeMap::new();
        for (pages, number) in [(&a, m), (&b, n)] {
            for (class, rest, _) in pages.iter().filter(|p| (p.0, p.1) != (0, 0)) {
                *copies.entry((*class, *rest)).or_insert(0_u64) += u64::from(number);
            }
        }
        let want = Savings {
            pages: copies.values().sum(),
            saved: copies.values().map(|copies| copies.saturating_sub(1)).sum(),
        };
        let (a, b) = (bytes(&a), bytes(&b));
        let (a, b) = (TableRef::parse(&a).unwrap(), TableRef::parse(&b).unwrap());
        prop_assert_eq!(mix(&[(a, m), (b, n)]).unwrap(), want);
        let common = overlap(&a, &b).unwrap();
        prop_assert_eq!(common.both + common.only_first, a.len() as u64);
        prop_assert_eq!(common.both + common.only_second, b.len() as u64);
    }
}

#[test]
fn what_is_wrong_is_named() {
    let two = bytes(&[(1, 1, true), (2, 2, false)]);
    let fault = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = two.clone();
        change(&mut bytes);
        TableRef::parse(&resealed(bytes)).unwrap_err()
    };
    let second = HEADER_LEN + RECORD_LEN;
    assert_eq!(TableRef::parse(b"").unwrap_err(), FormatError::NoTable);
    assert_eq!(fault(&|b| b[8] = 2), FormatError::Version(2));
    assert_eq!(fault(&|b| b[12] = 64), FormatError::RecordLen(64));
    let length = |has, should| FormatError::Length { has, should };
    assert_eq!(fault(&|b| b[16] = 3), length(240, 296));
    assert_eq!(fault(&|b| b[16..24].fill(255)), length(240, 128 + 56 * u128::from(u64::MAX)));
    assert_eq!(fault(&|b| b.push(0)), length(241, 240));
    assert_eq!(fault(&|b| b[24] = 7), FormatError::Pages { is: 2, should: 7 });
    let unsorted = SamplingError([8, 8, 2048, 3072]);
    assert_eq!(
        fault(&|b| b[32..36].copy_from_slice(&[8, 0, 8, 0])),
        FormatError::Sampling(SamplingError([8, 8, 2048, 3072]))
    );
    assert!(unsorted.to_string().contains("multiples of 8 below 4096"), "{unsorted}");
    assert_eq!(fault(&|b| b[48] = 27), FormatError::Name("\u{1b} name".into()));
    assert_eq!(fault(&|b| b[second..][..32].fill(0)), FormatError::Order(1));
    assert_eq!(fault(&|b| b.copy_within(HEADER_LEN..second, second)), FormatError::Order(1));
    assert_eq!(fault(&|b| b[second + 48] = 0), FormatError::Count(1));
    assert_eq!(fault(&|b| b[second + 52] = 2), FormatError::Flags { at: 1, flags: 2 });
    let zeros = hash(&[0; PAGE_LEN]).to_le_bytes();
    let to_zeros = |b: &mut Vec<u8>| {
        b[HEADER_LEN..][..32].fill(0);
        b[HEADER_LEN + 32..][..16].copy_from_slice(&zeros);
    };
    assert_eq!(fault(&to_zeros), FormatError::Zeros(0));
}

#[test]
fn words_are_sampled_where_it_says() {
    let mut page = [0; PAGE_LEN];
    page[0] = 1;
    page[4095] = 2;
    let sampling = Sampling::new([0, 8, 16, 4088]).unwrap();
    assert_eq!(sampling.sample(&page), Sampled([1, 0, 0, 2 << 56]));
    for wrong in [[0, 1024, 2048, 4096], [0, 1, 2048, 3072], [0, 0, 8, 16], [8, 0, 16, 24]] {
        assert_eq!(Sampling::new(wrong), Err(SamplingError(wrong)));
    }
}

#[test]
fn classes_are_counted() {
    let bytes = bytes(&[(1, 1, true), (1, 2, true), (1, 2, false), (2, 0, false), (0, 0, true)]);
    let found = Statistics::of(&TableRef::parse(&bytes).unwrap());
    assert_eq!(found.all, Amount { pages: 4, distinct: 3 });
    assert_eq!(found.code, Amount { pages: 3, distinct: 2 });
    assert_eq!((found.zeros, found.classes, found.single_classes), (1, 2, 1));
    assert_eq!(found.largest_class, 2);
    assert!((found.mean_class - 5.0 / 3.0).abs() < 1e-9);
}

#[test]
fn a_page_of_zeros_at_the_samples_is_no_page_of_zeros() {
    let mut builder = Builder::new(Sampling::default());
    builder.add(&page(0, 5), false).unwrap();
    builder.add(&page(0, 0), false).unwrap();
    assert_eq!((builder.len(), builder.finish().zero_pages), (1, 1));
}

#[test]
fn what_overlaps_only_in_sampling_is_not_compared() {
    let other =
        Builder::new(Sampling::new([8, 16, 24, 32]).unwrap()).finish().to_bytes("").unwrap();
    let (a, b) = (bytes(&[]), other);
    let (a, b) = (TableRef::parse(&a).unwrap(), TableRef::parse(&b).unwrap());
    let error = overlap(&a, &b).unwrap_err().to_string();
    assert!(
        error.contains("[0, 1024, 2048, 3072]") && error.contains("[8, 16, 24, 32]"),
        "{error}"
    );
    assert!(mix(&[(a, 1), (b, 1)]).is_err());
}
