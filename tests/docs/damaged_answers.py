"""Prints an inference golden with one token, one log-probability and one text changed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

answers = json.loads(Path(sys.argv[1]).read_text())
answers.pop("_provenance")
answers["1"]["generated_tokens"][4] = 7
answers["0"]["logprobs"][12] -= 4e-3
answers["2"]["generated_text"] = answers["2"]["generated_text"][:1]
print(json.dumps(answers))
