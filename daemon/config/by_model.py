"""What each of several models has of the configuration: a daemon with it alone would have this."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import structs

from daemon.config.answerable import refusal_of
from daemon.config.question_sets import SETS
from daemon.config.schema import Config, ModelConfig, NamedModel, QuestionConfig, SessionSettings
from daemon.config.standing import refusal_by, table_of
from feeds.connector import SettingError

NO_SESSION = ("",)
"""As `sessions` of a question: no session has this name."""
_OF_POOL = ("blocks", "memory", "host_blocks")
"""Keys of `[pool]` that each of `[[models]]` has of its own."""


def by_model(config: Config) -> tuple[Config, ...]:
    """For each model, that of `[model]` first: its sessions, patterns and pool, and what it can answer."""
    return tuple(_part(config, each) for each in (config.model, *config.models))


def of_session(config: Config, session: SessionSettings) -> Config:
    """The one of `by_model` with this session."""
    return _part(config, config.model_of(session))


def _part(config: Config, model: ModelConfig) -> Config:
    if not config.models:
        return config
    pool, scheduler, settings = config.pool, config.scheduler, model
    if isinstance(model, NamedModel):
        own = {name: getattr(model, name) for name in _OF_POOL}
        pool = structs.replace(pool, **own)
        scheduler = structs.replace(scheduler, profile="")  # it was measured with the first one
        settings = structs.replace(model, threads=config.model.threads)

    def asked(question: QuestionConfig) -> QuestionConfig:
        """With its place in the list, by which errors name it."""
        return structs.replace(question, sessions=NO_SESSION) if refusal_by(model, question) else question

    added = _of_preset(config, model)
    return structs.replace(
        config,
        standing=config.standing if added is None else "none",
        model=settings,
        models=(),
        pool=pool,
        scheduler=scheduler,
        sessions=tuple(each for each in config.sessions if config.model_of(each) is model),
        patterns=tuple(each for each in config.patterns if config.model_of(each) is model),
        questions=(*(added or ()), *map(asked, config.questions)),
    )


def _of_preset(config: Config, model: ModelConfig) -> tuple[QuestionConfig, ...] | None:
    """Tables of the preset's questions that the model can answer; None where these are all of them."""
    preset = SETS[config.standing]
    kept = [each for each in preset if not refusal_of(model, each)]
    if len(kept) == len(preset):
        return None
    return tuple(structs.replace(table_of(each, ""), sessions=()) for each in kept)


@contextmanager
def keys_of_file(config: Config, number: int) -> Iterator[None]:
    """Have a SettingError of the part with this number of `by_model` name the file's own key."""
    try:
        yield
    except SettingError as error:
        raise SettingError(key_of_file(config, number, error.key), error.message) from error


def key_of_file(config: Config, number: int, key: str) -> str:
    """The key that the file has for ``key`` of the part with this number of `by_model`."""
    if found := re.match(r"(sessions|patterns)\[(\d+)\](.*)", key):
        table, index, rest = found[1], int(found[2]), found[3]
        model = (config.model, *config.models)[number]
        own = [n for n, each in enumerate(getattr(config, table)) if config.model_of(each) is model]
        return f"{table}[{own[index]}]{rest}"
    if found := re.match(r"questions\[(\d+)\](.*)", key):
        added = len(_of_preset(config, (config.model, *config.models)[number]) or ())
        index = int(found[1]) - added
        return f"questions[{index}]{found[2]}" if index >= 0 else "standing"
    if number and (found := re.match(rf"model\.(.*)|pool\.({'|'.join(_OF_POOL)})$", key)):
        return f"models[{number - 1}].{found[1] or found[2]}"
    return key
