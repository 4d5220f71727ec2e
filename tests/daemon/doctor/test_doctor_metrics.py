"""The rules by which `foretick doctor` judges metrics; the catalogue and the pages know what they name."""

import re
from pathlib import Path

import pytest

from daemon.doctor.metric_rules import NAMED, RULES, Labels, Rule, judge_metrics, judge_rule
from daemon.doctor.smells import SMELLS
from daemon.top.scrape import parse
from metrics.catalogue import BY_NAME, OPEN_LABELS
from tests.docs.test_docs import anchors

ROOT = Path(__file__).parents[3]


def series(name: str, value: float, **labels: str) -> dict[tuple[str, Labels], float]:
    return {(f"foretick_{name}", frozenset(labels.items())): value}


def rule_of(metric: str) -> Rule:
    return next(each for each in RULES if each.metric == metric)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.metric}-{rule.worry}")
def test_rules_name_metrics_and_labels_of_the_catalogue(rule: Rule) -> None:
    for name, labels in ((rule.metric, rule.labels), *([rule.share_of] if rule.share_of else [])):
        metric = BY_NAME[f"foretick_{name}"]
        for label, value in labels.items():
            assert label in metric.labels
            assert label in OPEN_LABELS or value in metric.values[label]
    assert (rule.worry == "rises") <= (BY_NAME[f"foretick_{rule.metric}"].kind != "histogram")


WRITTEN = {
    guide
    for module in (ROOT / "daemon" / "doctor").glob("*.py")
    for guide in re.findall(r'"([a-z-]+\.md(?:#[a-z-]+)?)"', module.read_text())
}


@pytest.mark.parametrize(
    "guide", sorted({r.step[1] for r in RULES} | {each[-1] for each in SMELLS} | WRITTEN)
)
def test_guides_lead_to_sections_that_exist(guide: str) -> None:
    page, _, anchor = guide.partition("#")
    text = (ROOT / "docs" / page).read_text()
    assert not anchor or anchor in anchors(text)


@pytest.mark.parametrize(
    ("metric", "labels", "before", "after", "worries"),
    [
        ("engine_up", {}, 1, 1, False),
        ("engine_up", {}, 1, 0, True),
        ("engine_restarts_total", {}, 2, 2, True),
        ("engine_restarts_total", {}, 0, 0, False),
        ("records_malformed_total", {"reason": "json"}, 7, 7, False),
        ("records_malformed_total", {"reason": "json"}, 7, 8, True),
        ("records_malformed_total", {"reason": "json"}, 7, 0, False),  # the daemon was restarted between them
        ("ring_fill_ratio", {"source": "kafka"}, 0.5, 0.95, True),
        ("consumer_lag_records", {"partition": "t/0"}, 100, 900, False),
        ("consumer_lag_records", {"partition": "t/0"}, 100, 1200, True),
        ("venue_delay_seconds", {"venue": "V"}, 0.1, -0.2, True),
        ("query_refused_total", {"reason": "unreadable"}, 0, 9, False),
        ("query_refused_total", {"reason": "busy"}, 0, 9, True),
        ("feed_faults_total", {"kind": "zero_size"}, 3, 4, True),
        ("feed_faults_total", {"kind": "duplicate"}, 3, 9, False),
        ("records_late_total", {"session": "a"}, 3, 4, True),
        ("checkpoints_total", {"outcome": "failed"}, 3, 4, True),
        ("checkpoints_total", {"outcome": "done"}, 3, 9, False),
        ("adapted_coverage", {"session": "a"}, 0.9, 0.999, True),
        ("adapted_coverage", {"session": "a"}, 0.9, 0.95, False),
    ],
)
def test_a_rule_worries_at_its_bound(
    metric: str, labels: dict[str, str], before: float, after: float, worries: bool
) -> None:
    rules = [each for each in RULES if each.metric == metric]
    scrapes = series(metric, before, **labels), series(metric, after, **labels)
    found = next((each for rule in rules if (each := judge_rule(rule, *scrapes))), None)
    assert (found is not None) == worries
    assert found is None or BY_NAME[f"foretick_{metric}"].help in found.seen


def test_shares_are_of_the_whole_and_unknown_while_it_is_0() -> None:
    pool, drafts = rule_of("pool_blocks"), rule_of("draft_tokens_total")
    for used, free, worries in ((99, 1, True), (90, 10, False), (0, 0, False)):
        found = series("pool_blocks", used, state="used") | series("pool_blocks", free, state="free")
        assert (judge_rule(pool, {}, found) is not None) == worries
    for accepted, rejected, worries in ((0, 100, True), (50, 50, False), (0, 0, False)):
        found = series("draft_tokens_total", accepted, outcome="accepted")
        found |= series("draft_tokens_total", rejected, outcome="rejected")
        assert (judge_rule(drafts, {}, found) is not None) == worries


def test_a_gap_that_is_not_known_yet_is_not_low() -> None:
    (low,) = (each for each in RULES if each.worry == "low")
    assert [judge_rule(low, {}, series("gap_ratio", v, session="a")) is None for v in (0, 0.5, 1)] == [
        1,
        0,
        1,
    ]


def test_what_is_above_its_bound_in_either_scrape_is_a_worry() -> None:
    lag = rule_of("consumer_lag_seconds")
    high, low = (series("consumer_lag_seconds", value, partition="t/0") for value in (300, 0))
    worries = [judge_rule(lag, *each) is not None for each in ((high, low), (low, high), (low, low))]
    assert worries == [True, True, False]


def test_only_the_first_series_are_named_and_others_counted() -> None:
    many = {key: v for n in range(NAMED + 2) for key, v in series("source_up", 0, source=f"s{n}").items()}
    found = judge_rule(rule_of("source_up"), {}, many)
    assert found is not None
    assert found.verdict == "problem"
    assert "source s0 0" in found.seen
    assert "and 2 others" in found.seen


def test_where_no_rule_worries_that_is_what_is_found() -> None:
    text = 'foretick_engine_up 1.0\nforetick_bars_total{session="a"} 3.0\n'
    (found,) = judge_metrics(parse(text).values, parse(text).values)
    assert (found.check, found.verdict) == ("metrics", "ok")
    assert "over 2 series" in found.seen
