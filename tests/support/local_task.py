"""A task of lm-evaluation-harness from a file of this machine."""

import json
from collections.abc import Sequence
from pathlib import Path

from lm_eval.tasks import TaskManager

NAME = "local_endings"
TASK = """
task: local_endings
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: choices
doc_to_target: label
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


def endings_task(folder: Path, prompts: Sequence[str], endings: Sequence[str]) -> TaskManager:
    """Writes a task that asks which of `endings` follows each prompt, and returns what finds it as `NAME`.

    The caller sets HF_DATASETS_CACHE to a folder of its own.
    """
    data = folder / "items.jsonl"
    items = [
        {"context": prompt, "choices": list(endings), "label": index % len(endings)}
        for index, prompt in enumerate(prompts)
    ]
    data.write_text("".join(json.dumps(item) + "\n" for item in items))
    (folder / f"{NAME}.yaml").write_text(TASK % data)
    return TaskManager(include_path=str(folder), include_defaults=False)
