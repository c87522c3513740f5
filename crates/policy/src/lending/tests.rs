//! Loans between groups, second by second, from ledgers written by hand.

use super::*;

/// Groups that take part, and their loans, second by second.
struct Groups {
    parties: BTreeMap<GroupName, Party>,
    book: Book,
    now: Time,
}

impl Groups {
    fn new(parties: impl IntoIterator<Item = (&'static str, Party)>) -> Self {
        let parties = parties.into_iter().map(|(name, party)| (name.into(), party)).collect();
        Self { parties, book: Book::default(), now: Time(1_000_000) }
    }

    /// The same groups after a time without a shortage.
    fn calm(parties: impl IntoIterator<Item = (&'static str, Party)>) -> Self {
        let mut groups = Self::new(parties);
        let calm = |party: &Party| Party { short: None, lacking: None, ..party.clone() };
        let parties = groups.parties.iter().map(|(name, p)| (name.clone(), calm(p))).collect();
        assert!(groups.book.settle(&parties, None, groups.now).is_empty());
        groups.now = groups.now.after(tuning::LEND_AFTER);
        groups
    }

    fn of(&mut self, name: &str) -> &mut Party {
        self.parties.get_mut(&name.into()).expect("a group of this name")
    }

    fn second(&mut self) -> BTreeMap<GroupName, Loan> {
        self.now = self.now.after(tuning::PERIOD);
        self.book.settle(&self.parties, None, self.now)
    }
}

fn idle(surplus_mib: u64) -> Party {
    Party {
        lend: LendSpec::Open(true),
        surplus: Bytes::mib(surplus_mib),
        reserve: Bytes::mib(20),
        held: Bytes::ZERO,
        short: None,
        lacking: None,
    }
}

const SIGN: Pressure = Pressure::Swapping { per_second: Bytes::mib(3) };

fn short(lacking_mib: u64) -> Party {
    let (vm, amount) = (VmName::from("vm"), Bytes::mib(lacking_mib));
    let short = Some((vm.clone(), SIGN));
    Party { short, lacking: Some(Lacking { vm, sign: SIGN, amount }), ..idle(0) }
}

/// The borrower of `lender`'s loan, and the amount in MiB.
fn loan<'a>(loans: &'a BTreeMap<GroupName, Loan>, lender: &str) -> Option<(&'a str, u64)> {
    let loan = loans.get(&lender.into())?;
    Some((loan.borrower.as_str(), loan.amount.0 >> 20))
}

fn why(loans: &BTreeMap<GroupName, Loan>, lender: &str) -> Reason {
    loans[&lender.into()].reason.clone()
}

#[test]
fn a_loan_grows_by_what_is_lacking_up_to_what_is_idle() {
    let mut groups = Groups::calm([("rich", idle(60)), ("poor", short(15))]);
    let loans = groups.second();
    assert_eq!(loan(&loans, "rich"), Some(("poor", 15)));
    let idle = Bytes::mib(40);
    assert_eq!(why(&loans, "rich"), Reason::Lend { needed_by: "vm".into(), sign: SIGN, idle });
    groups.of("poor").held = Bytes::mib(15);
    assert_eq!(loan(&groups.second(), "rich"), Some(("poor", 30)));
    groups.of("poor").held = Bytes::mib(30);
    assert_eq!(loan(&groups.second(), "rich"), Some(("poor", 40)), "its reserve twice stays");
    assert_eq!(why(&groups.second(), "rich"), Reason::LoanUsed);
}

#[test]
fn nothing_is_lent_before_the_lender_has_been_calm_for_a_while() {
    let mut groups = Groups::new([("rich", idle(60)), ("poor", short(10))]);
    let lent_in = (1..30).find(|_| !groups.second().is_empty());
    assert_eq!(lent_in, Some(11), "the first second begins the wait");
}

#[test]
fn all_of_a_loan_is_gone_in_the_second_in_which_its_owner_is_short() {
    let mut groups = Groups::calm([("rich", idle(60)), ("poor", short(10))]);
    groups.second();
    groups.of("poor").held = Bytes::mib(10);
    groups.of("rich").short = Some(("owner".into(), SIGN));
    let loans = groups.second();
    assert_eq!(loan(&loans, "rich"), Some(("poor", 0)));
    let recalled = Reason::LoanRecalled { needed_by: "owner".into(), sign: SIGN };
    assert_eq!(why(&loans, "rich"), recalled);
    groups.of("rich").short = None;
    assert_eq!(groups.second(), BTreeMap::new(), "lent again too soon");
}

#[test]
fn a_loan_shrinks_with_its_owners_surplus() {
    let mut groups = Groups::calm([("rich", idle(60)), ("poor", short(40))]);
    groups.second();
    groups.of("poor").held = Bytes::mib(40);
    groups.of("rich").surplus = Bytes::mib(30);
    let loans = groups.second();
    assert_eq!(loan(&loans, "rich"), Some(("poor", 10)));
    assert_eq!(why(&loans, "rich"), Reason::LoanCut { idle: Bytes::mib(10) });
}

#[test]
fn what_the_borrower_uses_stays_lent_when_its_demand_has_ended_and_no_more() {
    let mut groups = Groups::calm([("rich", idle(60)), ("poor", short(30))]);
    groups.second();
    *groups.of("poor") = Party { held: Bytes::mib(20), ..idle(0) };
    let loans = groups.second();
    assert_eq!(loan(&loans, "rich"), Some(("poor", 20)));
    assert_eq!(why(&loans, "rich"), Reason::LoanUnneeded);
    groups.of("poor").held = Bytes::ZERO;
    assert_eq!(loan(&groups.second(), "rich"), Some(("poor", 0)));
    assert!(groups.second().is_empty());
}

#[test]
fn a_deficit_that_nobody_lent_is_not_covered() {
    let mut groups = Groups::calm([("rich", idle(600)), ("poor", short(10))]);
    groups.of("poor").held = Bytes::mib(300);
    assert_eq!(loan(&groups.second(), "rich"), Some(("poor", 10)));
}

fn circle(name: &str) -> LendSpec {
    LendSpec::Circle(name.to_owned())
}

#[test]
fn a_circle_lends_within_itself_alone() {
    let within = |name: &str, party: Party| Party { lend: circle(name), ..party };
    let mut groups = Groups::calm([
        ("a1", within("a", idle(60))),
        ("a2", within("a", short(100))),
        ("b", within("b", idle(600))),
        ("open", idle(600)),
    ]);
    let loans = groups.second();
    assert_eq!(loan(&loans, "a1"), Some(("a2", 40)));
    assert_eq!((loan(&loans, "b"), loan(&loans, "open")), (None, None));
}

#[test]
fn both_must_consent() {
    let no = |party: Party| Party { lend: LendSpec::Open(false), ..party };
    assert!(Groups::calm([("rich", no(idle(60))), ("poor", short(10))]).second().is_empty());
    assert!(Groups::calm([("rich", idle(60)), ("poor", no(short(10)))]).second().is_empty());
}

#[test]
fn a_loan_ends_with_the_consent_or_the_existence_of_either_side() {
    let change: [fn(&mut Groups); 3] = [
        |groups| groups.of("rich").lend = LendSpec::Open(false),
        |groups| groups.of("poor").lend = circle("b"),
        |groups| drop(groups.parties.remove(&"poor".into())),
    ];
    for change in change {
        let mut groups = Groups::calm([("rich", idle(60)), ("poor", short(10))]);
        groups.second();
        change(&mut groups);
        let loans = groups.second();
        assert_eq!(loan(&loans, "rich"), Some(("poor", 0)));
        assert_eq!(why(&loans, "rich"), Reason::LoanNotConsented);
    }
}

#[test]
fn no_loan_stands_while_there_may_be_none() {
    let mut groups = Groups::calm([("rich", idle(60)), ("poor", short(10))]);
    groups.second();
    let short = Reason::HostShort { available: Bytes::mib(1), reserve: Bytes::mib(2) };
    let loans = groups.book.settle(&groups.parties, Some(&short), groups.now);
    assert_eq!((loan(&loans, "rich"), why(&loans, "rich")), (Some(("poor", 0)), short));
}

#[test]
fn a_group_lends_to_one_other_and_may_borrow_from_several() {
    let groups = [("a", idle(35)), ("b", idle(90)), ("poor", short(100)), ("small", short(10))];
    let mut groups = Groups::calm(groups);
    let loans = groups.second();
    assert_eq!(loan(&loans, "b"), Some(("poor", 70)), "who has most lends first");
    assert_eq!(loan(&loans, "a"), Some(("poor", 15)));
    *groups.of("poor") = idle(0);
    groups.second();
    let loans = groups.second();
    assert_eq!((loan(&loans, "b"), loan(&loans, "a")), (Some(("small", 10)), None));
}

#[test]
fn what_one_lender_calls_back_another_can_stand_in_for() {
    let mut groups = Groups::calm([("a", idle(90)), ("b", idle(60)), ("poor", short(30))]);
    groups.second();
    groups.of("poor").held = Bytes::mib(30);
    groups.of("a").short = Some(("owner".into(), SIGN));
    let loans = groups.second();
    assert_eq!(loan(&loans, "a"), Some(("poor", 0)));
    assert_eq!(loan(&loans, "b"), Some(("poor", 40)));
}
