"""What processes do not import, they do not pay for: each is looked at in a process of its own."""

import subprocess
import sys

import pytest

MODELS = {"torch", "transformers", "tokenizers", "safetensors", "triton", "sympy", "pandas", "jinja2"}
OPTIONAL = {"aiokafka", "confluent_kafka", "mcp", "rich", "textual", "pyarrow", "matplotlib", "sklearn"}


def absent(imported: str, unwanted: set[str]) -> None:
    """Fail if importing this loads one of those packages."""
    code = f"import sys, {imported}; print(*({unwanted!r} & {{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    )
    assert not done.stdout.split()


@pytest.mark.parametrize("imported", ["daemon.cli.run, daemon.gateway.wiring", "daemon.cli.ask"])
def test_gateway_and_clients_load_no_model_code_and_no_broker_that_is_not_configured(
    imported: str,
) -> None:
    absent(imported, MODELS | OPTIONAL)


def test_an_engine_loads_no_broker_and_no_http_server() -> None:
    """And no model code before its process is pinned, and knows its settings."""
    absent("daemon.engine.process, daemon.engine.spec", MODELS | OPTIONAL | {"starlette", "uvicorn"})
