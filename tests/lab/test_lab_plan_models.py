"""Plans of several models: one each, of the memory that the others leave, and what they need together."""

from msgspec.structs import replace

from daemon.config.schema import UNTRAINED, Config, ModelConfig, NamedModel, QuestionConfig, SessionConfig
from lab.plan.load import Load
from lab.plan.plan import plans
from lab.plan.report import overloads, tables

LOAD = Load(ticks=20, seconds=3)
CONFIG = Config(
    standing="none",
    model=ModelConfig(),
    models=(NamedModel(name="chat", path=UNTRAINED),),
    sessions=(
        SessionConfig(name="one", symbol="V:A"),
        SessionConfig(name="two", symbol="V:A", model="chat", retention_tokens=256),
    ),
    questions=(
        QuestionConfig(name="trend", text="trend"),
        QuestionConfig(name="calm", text="Is it calm?", choices=("YES", "NO")),
    ),
)


def test_each_model_is_planned_with_its_questions_and_what_the_other_leaves_of_memory() -> None:
    found = plans(CONFIG, LOAD, 10**10)
    assert [(each.model[:9], each.sessions, each.questions) for each in found] == [
        ("foretick-", 1, 1),
        ("untrained", 1, 2),
    ]
    assert [each.overload for each in found] == [(), ()]
    text = tables(found)
    assert "model foretick-tape" in text
    share = sum(each.capacity.utilisation_ratio for each in found)
    assert text.endswith(f"all models together, utilisation by formula: {share:.1%}")
    alone = replace(CONFIG, models=(), sessions=CONFIG.sessions[:1], questions=CONFIG.questions[:1])
    one = plans(alone, LOAD, 10**10)
    assert (one[0].simulated, one[0].questions) == (found[0].simulated, found[0].questions)
    assert found[0].capacity.sessions_by_kv_memory < one[0].capacity.sessions_by_kv_memory


def test_models_that_fit_alone_may_not_fit_together() -> None:
    found = plans(CONFIG, LOAD, 10**10)
    busy = [replace(each, capacity=replace(each.capacity, utilisation_ratio=0.7)) for each in found]
    assert overloads(busy) == ["20 ticks a second, all models together need 140.0% of the device's time"]
    small = plans(CONFIG, LOAD, 60 * 10**6)
    assert any("memory" in why for each in small for why in each.overload)
