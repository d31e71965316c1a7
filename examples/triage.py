"""What to do with each of many checkpoints, by the codes of `zckpt verify --json` alone.

python examples/triage.py CHECKPOINT ...
"""

import json
import subprocess
import sys

TO_DO = {
    "copy the file again": "file-cut-short file-damaged file-not-understood record-damaged",
    "copy the missing file": "missing-file missing-rank-file elements-missing",
    "use an earlier checkpoint": "unfinished-save",
    "keep the files of one save": "copies-differ file-copied-over master-differs mixed-saves "
    "partition-does-not-fit ranks-disagree steps-disagree swapped-files world-size-disagrees",
    "choose one": "several-checkpoints several-formats several-tags pointer-dangling",
    "repeat the run that writes it with --resume": "unfinished-target",
    "give the directory that the training saved": "no-such-path not-a-checkpoint",
}
OF_CODE = {code: action for action, codes in TO_DO.items() for code in codes.split()}

for path in sys.argv[1:]:
    verify = subprocess.run(["zckpt", "verify", path, "--json"], stdout=subprocess.PIPE)
    report = json.loads(verify.stdout)
    found = [report] if "error" in report else report["problems"]
    actions = dict.fromkeys(OF_CODE.get(each["code"], each["code"]) for each in found)
    print(f"{path}: {', '.join(actions) or 'nothing to do'}")
