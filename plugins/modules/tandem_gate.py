#!/usr/bin/python
"""Proves a deploy end to end, from the router's host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: tandem_gate
short_description: Prove that prefill, decode and router serve together
description:
  - Waits until the router knows every worker, then asks it real questions. The deploy stands only if every
    answer has the expected
    content, came in bounded time, and every prefill counted KV bytes that it moved.
  - A worker's C(/health) proves none of that.
  - Sends requests, changes nothing on the host. In check mode nothing is sent.
options:
  router:
    description: URL of the router.
    type: str
    required: true
  workers:
    description:
      - The servers behind it, with C(role), C(name), C(host), C(url), and C(telemetry), where NIXL counts, or empty.
    type: list
    elements: dict
    required: true
  model:
    description: The model's served name.
    type: str
    required: true
  key:
    description: Key of the router's worker API, where it has one.
    type: str
    default: ""
  questions:
    description: The questions, with C(prompt), C(expect) (a regular expression for the answer) and C(max_tokens).
    type: list
    elements: dict
    required: true
  count:
    description: Requests that are sent, going round the questions. At least twice the number of workers are sent.
    type: int
    default: 8
  parallel:
    description: Requests at a time.
    type: int
    default: 4
  request_timeout:
    description: Seconds that one answer may take.
    type: int
    default: 60
  register_timeout:
    description: Seconds that the router may take to know every worker as healthy.
    type: int
    default: 120
attributes:
  check_mode: {support: full}
  diff_mode: {support: none}
author: [Tandem contributors]
"""

EXAMPLES = r"""
- name: Prove it
  tandem_gate:
    router: http://127.0.0.1:30000
    workers: "{{ tandem_plan.workers }}"
    model: DeepSeek-V4-Flash-NVFP4
    questions:
      - {prompt: "What is the capital of France? Answer with one word.", expect: Paris, max_tokens: 512}
"""

RETURN = r"""
answers:
  description: Prompt, text and seconds of each answer.
  returned: when requests were sent
  type: list
workers:
  description: What each worker counted meanwhile, C(requests), C(kv_bytes), and C(nixl_bytes) where NIXL counts.
  returned: when requests were sent
  type: dict
seconds:
  description: How long registration and requests took, in seconds.
  returned: when requests were sent
  type: dict
"""

import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.tandem import gate


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "router": {"type": "str", "required": True},
            "workers": {"type": "list", "elements": "dict", "required": True},
            "model": {"type": "str", "required": True},
            "key": {"type": "str", "default": "", "no_log": True},
            "questions": {"type": "list", "elements": "dict", "required": True},
            "count": {"type": "int", "default": 8},
            "parallel": {"type": "int", "default": 4},
            "request_timeout": {"type": "int", "default": 60},
            "register_timeout": {"type": "int", "default": 120},
        },
        supports_check_mode=True,
    )
    if module.check_mode:
        module.exit_json(changed=False, msg="Would ask the router; nothing is sent in check mode.")
    result, faults = run(module.params)
    if faults:
        module.fail_json(msg="The gate is shut:\n" + "\n".join(f"  - {fault}" for fault in faults), **result)
    module.exit_json(**result)


def run(params: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Asks and judges. Returns the module's result and the faults."""
    router, workers = params["router"], params["workers"]
    began = time.monotonic()
    missing = gate.wait_registered(router, workers, params["register_timeout"], params["key"])
    if missing:
        return {"changed": False}, [f"after {params['register_timeout']} s, {missing}"]
    registered = time.monotonic()
    questions = [gate.Question(row["prompt"], row["expect"], int(row["max_tokens"])) for row in params["questions"]]
    before = gate.counters(workers)
    answers = gate.ask_all(
        lambda question: gate.ask(router, params["model"], question, params["request_timeout"]),
        questions,
        max(params["count"], 2 * len(workers)),
        params["parallel"],
    )
    answered = time.monotonic()
    deltas = gate.settled(before, workers, gate.COUNTERS_LATE)
    result = {
        "changed": False,
        "answers": [
            {"prompt": answer.question.prompt, "text": answer.text, "seconds": round(answer.seconds, 3)}
            for answer in answers
        ],
        "workers": {f"{worker['host']}/{worker['name']}": deltas[worker["url"]] for worker in workers},
        "seconds": {
            "register": round(registered - began, 1),
            "requests": round(answered - registered, 1),
        },
    }
    return result, gate.judge(answers, workers, deltas)


if __name__ == "__main__":
    main()
