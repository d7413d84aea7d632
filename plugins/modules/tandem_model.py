#!/usr/bin/python
"""Puts a revision of a model in place on a host, verified against its manifest."""

from __future__ import annotations

DOCUMENTATION = r"""
module: tandem_model
short_description: Put a revision of a model in place, whole and verified
description:
  - Publishes a directory of this host as a revision of a model, after every file was held against a SHA-256 manifest.
    A revision appears whole or not at all, and an engine never sees a partial one.
  - What was verified is remembered by size, times and inode of each file, so that a run that changes nothing reads no
    file. A file whose numbers changed is hashed again. A damaged or missing file of a copy is fetched again, alone.
  - Stages only. Nothing is restarted.
  - Check mode hashes no source (minutes for a large model) and says so. Everything else is looked at as in a run.
options:
  path:
    description: Where the revision is published, C(/var/lib/tandem/models/<name>/<revision>).
    type: path
    required: true
  source:
    description:
      - Directory on the host that holds the files, a local disk or a mounted share. Not needed any more once the
        revision was copied.
    type: path
    required: true
  manifest:
    description: Text of the manifest, in the format of sha256sum.
    type: str
    required: true
  manifest_name:
    description: How messages call the manifest.
    type: str
    default: model_sync_manifest
  mode:
    description:
      - V(copy) copies beside, hashes while it copies, makes it durable and renames it into place.
      - V(in_place) verifies the source and publishes a link to it.
    type: str
    choices: [copy, in_place]
    default: copy
  threads:
    description: Files that are read at a time. 0 takes one a CPU, at most 8.
    type: int
    default: 0
"""

RETURN = r"""
manifest_digest:
  description: Identifies the bytes of the revision.
  returned: success
  type: str
files:
  description: Number of files of the revision.
  returned: success
  type: int
bytes_read:
  description: Bytes that were read to verify or copy the model. 0 when all was verified before.
  returned: success
  type: int
"""

import os
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.tandem import manifest, model_store
from ansible.module_utils.tandem.problems import Problem, TandemError, report

MOST_THREADS = 8


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "source": {"type": "path", "required": True},
            "manifest": {"type": "str", "required": True},
            "manifest_name": {"type": "str", "default": "model_sync_manifest"},
            "mode": {"type": "str", "choices": ["copy", "in_place"], "default": "copy"},
            "threads": {"type": "int", "default": 0},
        },
        supports_check_mode=True,
    )
    given = module.params
    entries, problems = manifest.read(given["manifest"], given["manifest_name"])
    if not Path(given["source"]).is_absolute():
        problems.append(Problem("model_sync_source", given["source"], "an absolute path on the host"))
    if problems:
        module.fail_json(msg=report("The model's settings are wrong, nothing was changed", problems))
    request = model_store.Request(
        target=Path(given["path"]),
        source=Path(given["source"]),
        entries=entries,
        mode=given["mode"],
        threads=given["threads"] or min(MOST_THREADS, os.cpu_count() or 1),
        check=module.check_mode,
    )
    try:
        outcome = model_store.put_in_place(request)
    except TandemError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"The model at {request.target} is not in place: {error}")
    lines = [(entry.path, f"{entry.sha256}  {entry.path}\n") for entry in entries]
    module.exit_json(
        changed=outcome.changed,
        msg="; ".join(outcome.did) or f"{len(entries)} files are as they were verified",
        manifest_digest=request.digest,
        files=len(entries),
        bytes_read=outcome.bytes_read,
        diff={
            "before_header": str(request.target),
            "after_header": str(request.target),
            "before": "".join(line for path, line in lines if path in outcome.right),
            "after": "".join(line for path, line in lines if outcome.changed or path in outcome.right),
        },
    )


if __name__ == "__main__":
    main()
