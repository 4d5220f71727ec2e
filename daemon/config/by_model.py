"""What each of several models has of the configuration: a daemon with it alone would have this."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import structs

from daemon.config.schema import Config, ModelConfig, NamedModel, QuestionConfig, SessionSettings
from daemon.config.standing import refusal_by
from feeds.connector import SettingError

NO_SESSION = ("",)
"""As `sessions` of a question: no session has this name."""


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
        pool = structs.replace(pool, blocks=model.blocks, host_blocks=model.host_blocks)
        scheduler = structs.replace(scheduler, profile="")  # it was measured with the first one
        settings = structs.replace(model, threads=config.model.threads)

    def asked(question: QuestionConfig) -> QuestionConfig:
        """With its place in the list, by which errors name it."""
        return structs.replace(question, sessions=NO_SESSION) if refusal_by(model, question) else question

    return structs.replace(
        config,
        model=settings,
        models=(),
        pool=pool,
        scheduler=scheduler,
        sessions=tuple(each for each in config.sessions if config.model_of(each) is model),
        patterns=tuple(each for each in config.patterns if config.model_of(each) is model),
        questions=tuple(map(asked, config.questions)),
    )


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
    if number and (found := re.match(r"model\.(.*)|pool\.(blocks|host_blocks)$", key)):
        return f"models[{number - 1}].{found[1] or found[2]}"
    return key
