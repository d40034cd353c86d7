"""Manifests: valid for every supported Kubernetes, and saying what the agents need."""

from __future__ import annotations

import copy
import sys

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cli import main
from holdfast.launchers.kubernetes_yaml import Commented, documents
from holdfast.protocol.exit_codes import Scheduler, codes_for
from tests.kubernetes.manifests import (
    IMAGE,
    IN_PLACE,
    NEWEST,
    OLDEST,
    agent_of,
    expanded,
    job_of,
    jobs_in,
    pod_of,
    printed,
    submit,
    validate_all,
)
from tests.support.tables import tables

TABLES = tables(__file__)

LINES = TABLES["lines"]

AGAIN, NEVER = ([each.number for each in codes_for(what)] for what in (Scheduler.AGAIN, Scheduler.NEVER))


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_every_manifest_is_valid_by_the_strict_schemas(line: tuple[str, ...], version: str) -> None:
    if version == OLDEST and "--restart-agent" in line:
        version = IN_PLACE
    manifests = printed(*line)
    validate_all(manifests, version)
    # The judge is awake: a key too many is refused.
    broken = copy.deepcopy(manifests)
    pod_of(broken)["nope"] = 1
    with pytest.raises(jsonschema.ValidationError):
        validate_all(broken, version)


def test_the_same_line_prints_the_same_text() -> None:
    first, second = (submit(*LINES["everything"])[1] for _ in range(2))
    assert first == second
    assert first.count("\n# ") + first.count("  # ") > 12


def test_the_nodes_meet_at_pod_0() -> None:
    service, job = printed(*LINES["plain"])
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"] == "train"
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    args = agent_of([job])["args"]
    assert "--rdzv-endpoint=train-0.train:29400" in args
    assert "--node-rank=$(JOB_COMPLETION_INDEX)" in args
    assert "--nnodes=4" in args
    assert "--rdzv-conf=join_timeout=3600" in args
    assert args[-2:] == ["--", "train.py"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 4
    assert job["spec"]["completionMode"] == "Indexed"


def test_a_jobset_names_its_pods_itself() -> None:
    (jobset,) = printed(*LINES["jobset"])
    assert jobset["spec"]["network"] == {
        "enableDNSHostnames": True,
        "subdomain": "train",
        "publishNotReadyAddresses": True,
    }
    assert "--rdzv-endpoint=train-node-0-0.train:29400" in agent_of([jobset])["args"]
    assert "subdomain" not in pod_of([jobset])
    assert jobset["spec"]["ttlSecondsAfterFinished"] == 600


def test_a_trainjob_brings_its_own_runtime() -> None:
    runtime, job = printed(*LINES["trainjob"])
    assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    assert job["spec"]["trainer"]["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"] == 8
    (replicated,) = jobs_in(runtime)
    # Kubeflow's webhook refuses another name of the container, and finds the job by the label.
    assert replicated["replicas"] == 1
    assert replicated["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    agent = agent_of([runtime])
    assert agent["name"] == "node"
    assert "--nnodes=4:8" in agent["args"]
    assert "--rdzv-endpoint=train-node-0-0.train:29400" in agent["args"], "the JobSet is called as the TrainJob"
    rules = job_of([runtime])["podFailurePolicy"]["rules"]
    assert {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule} == {"node"}
    assert not [each["name"] for each in agent["env"] if each["name"].startswith("PET_")], "they are Kubeflow's"


def test_a_queue_admits_the_job_and_not_its_pods() -> None:
    service, job = printed(*LINES["queued"])
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert job["metadata"]["annotations"] == {"kueue.x-k8s.io/job-min-parallelism": "4"}
    for labels in (service["metadata"]["labels"], job["spec"]["template"]["metadata"]["labels"]):
        assert "kueue.x-k8s.io/queue-name" not in labels
    train_job = printed(*LINES["trainjob"])[-1]
    assert train_job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    fixed = printed(*IMAGE, "--nodes", "4", "--queue", "team-a", "train.py")[-1]
    assert "annotations" not in fixed["metadata"]


def test_restarts_in_place_are_counted_by_the_jobset() -> None:
    account, role, binding, jobset = printed(*LINES["in_place"])
    policy = jobset["spec"]["failurePolicy"]
    assert (policy["maxRestarts"], policy["restartStrategy"]) == (3, "InPlaceRestart")
    job, pod, agent = job_of([jobset]), pod_of([jobset]), agent_of([jobset])
    # JobSet's conditions for this strategy.
    assert job["backoffLimit"] == 2**31 - 1
    assert job["podReplacementPolicy"] == "Failed"
    assert not {"backoffLimitPerIndex", "maxFailedIndexes"} & job.keys()
    (restarter,) = pod["initContainers"]
    assert restarter["restartPolicy"] == "Always", "beside our agent, which keeps its time to save"
    assert {each["name"] for each in restarter["env"]} == {"JOBSET_NAME", "POD_NAME"}
    assert restarter["startupProbe"]["httpGet"] == {"path": "/barrier-is-down", "port": 8081}
    (rule,) = agent["restartPolicyRules"]
    assert rule == {
        "action": "RestartAllContainers",
        "exitCodes": {"operator": "NotIn", "values": [0, *sorted(AGAIN + NEVER)]},
    }
    assert (agent["restartPolicy"], pod["restartPolicy"]) == ("Never", "Never")
    assert pod["serviceAccountName"] == account["metadata"]["name"] == binding["subjects"][0]["name"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"][0]["namespace"] == "team"
    assert {tuple(each["verbs"]) for each in role["rules"]} == {("patch",), ("get", "list", "watch")}
    own = printed(*LINES["in_place"][:-1], "--service-account", "mine", "train.py")
    assert [each["kind"] for each in own] == ["JobSet"]
    assert pod_of(own)["serviceAccountName"] == "mine"


def test_one_node_meets_nobody() -> None:
    (job,) = printed(*LINES["alone"])
    args = agent_of([job])["args"]
    assert "--standalone" in args
    assert not [word for word in args if "rdzv-endpoint" in word or "node-rank" in word]
    assert [each["name"] for each in agent_of([job])["env"]] == ["POD_IP"]


def test_which_ends_of_a_pod_count() -> None:
    spec = job_of(printed(*LINES["plain"]))
    disrupted, requeued, wrong = spec["podFailurePolicy"]["rules"]
    assert disrupted["action"] == requeued["action"] == "Ignore"
    assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert requeued["onExitCodes"] == {"containerName": "agent", "operator": "In", "values": AGAIN}
    assert (wrong["action"], wrong["onExitCodes"]["values"]) == ("FailJob", NEVER)
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (3, 0)
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    elastic = job_of(printed(*LINES["elastic"]))
    assert elastic["maxFailedIndexes"] == 4
    assert elastic["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    assert "successPolicy" not in spec


@pytest.mark.parametrize(
    ("words", "grace_s", "said"),
    [
        ((), 225, ["--drain-timeout=60", "--shutdown-timeout=30"]),
        (("--drain-timeout", "300.5"), 466, ["--drain-timeout=300.5", "--shutdown-timeout=30"]),
        (("--drain-timeout=600", "--shutdown-timeout=5"), 740, ["--drain-timeout=600", "--shutdown-timeout=5"]),
        (("--drain-timeout=2000000",), 2000165, ["--drain-timeout=2000000"]),
    ],
)
def test_the_grace_is_tied_to_the_drain(words: tuple[str, ...], grace_s: int, said: list[str]) -> None:
    manifests = printed(*IMAGE, "--nodes", "2", *words, "train.py")
    assert pod_of(manifests)["terminationGracePeriodSeconds"] == grace_s
    patience = [word for word in agent_of(manifests)["args"] if "timeout=" in word and "rdzv" not in word]
    assert set(said) <= set(patience)
    assert len(patience) == 2


def test_probes_ask_the_agents_health() -> None:
    agent = agent_of(printed(*LINES["everything"]))
    assert "--health=[$(POD_IP)]:9401" in agent["args"]
    assert "--metrics=[$(POD_IP)]:9500" in agent["args"]
    assert {port["name"]: port["containerPort"] for port in agent["ports"]} == {
        "health": 9401,
        "metrics": 9500,
        "rendezvous": 29400,
    }
    assert agent["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "health"}
    assert agent["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "health"}
    assert agent["env"][0] == {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


def test_what_is_said_of_the_pods_arrives_there() -> None:
    manifests = printed(*LINES["everything"])
    pod, agent = pod_of(manifests), agent_of(manifests)
    assert {manifest["metadata"]["namespace"] for manifest in manifests} == {"team"}
    asked = {"cpu": "32", "memory": "256Gi", "amd.com/gpu": 8}
    assert agent["resources"] == {"requests": asked, "limits": asked}
    values = {each["name"]: each.get("value") for each in agent["env"]}
    assert (
        values | {"A": "1,2", "B": "$$(hostname)", "C": "a$$$$b$$$$(D)$$", "EMPTY": "", "OMP_NUM_THREADS": "4"}
        == values
    )
    assert agent["envFrom"] == [{"secretRef": {"name": "wandb"}}, {"configMapRef": {"name": "settings"}}]
    assert pod["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    assert agent["volumeMounts"][0] == {"name": "shm", "mountPath": "/dev/shm"}
    assert agent["volumeMounts"][2] == {"name": "volume-0", "mountPath": "/mnt/data", "readOnly": True}
    assert pod["volumes"][4]["secret"] == {"secretName": "s", "defaultMode": 0o400}
    assert pod["volumes"][5]["hostPath"] == {"path": "/raid"}
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["fsGroup"]) == (1000, 100)
    assert agent["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod["serviceAccountName"] == "trainer"
    assert pod["nodeSelector"] == {"gpu.example/kind": "b200"}
    assert manifests[-1]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert expanded(values["C"], {"D": "no"}) == "a$$b$$(D)$", "by Kubernetes' own rule"
    assert agent["workingDir"] == "/workspace"
    assert agent["args"][-6:] == ["--", "pkg.train", "--lr", "$$(date)", "--", "-x"]
    assert {"--module", "--max-restarts=3", "--nproc-per-node=8"} <= set(agent["args"])
    assert "--rdzv-conf=join_timeout=3600,lease=10" in agent["args"]


def test_without_an_account_none_is_mounted() -> None:
    assert pod_of(printed(*LINES["plain"]))["automountServiceAccountToken"] is False


def test_torchruns_own_word_for_nodes_and_a_meeting_place_elsewhere() -> None:
    line = ("--nnodes=2", "--rdzv-backend=etcd", "--rdzv-endpoint=etcd:2379", "--rdzv-id=j", "train.py")
    args = agent_of(printed(*IMAGE, *line))["args"]
    last = {word.partition("=")[0]: word.partition("=")[2] for word in args}
    assert (last["--nnodes"], last["--rdzv-backend"], last["--rdzv-endpoint"]) == ("2", "etcd", "etcd:2379")
    assert last["--rdzv-id"] == "j"
    assert "--rdzv-conf" not in last


@pytest.mark.parametrize(
    ("script", "name"),
    [("src/Train_GPT.py", "train-gpt"), ("7.py", "job-7"), ("bin/v1.2.sh", "v1-2-sh"), ("a" * 70 + ".py", "a" * 40)],
)
def test_the_name_of_the_script_is_the_jobs(script: str, name: str) -> None:
    assert printed(*IMAGE, "--nodes", "2", script)[-1]["metadata"]["name"] == name


def test_the_token_is_in_no_manifest_that_is_printed() -> None:
    _, text, _ = submit(*LINES["plain"])
    assert "kind: Secret" not in text
    assert "kubectl create secret generic train-token --from-file=token=/dev/stdin" in text
    variables = {each["name"]: each.get("valueFrom") for each in agent_of(printed(*LINES["plain"]))["env"]}
    assert variables["HOLDFAST_TOKEN"] == {"secretKeyRef": {"name": "train-token", "key": "token"}}
    mine = agent_of(printed(*IMAGE, "--nodes", "2", "--token-secret", "mine", "train.py"))["env"]
    assert mine[1]["valueFrom"] == {"secretKeyRef": {"name": "mine", "key": "token"}}
    none = agent_of(printed(*IMAGE, "--nodes", "2", "--no-token", "train.py"))["env"]
    assert [each["name"] for each in none] == ["POD_IP"]


# --- what is written by ruamel.yaml (YAML 1.2) is read by PyYAML (1.1, as kubectl does) --------------------------------


MEANINGFUL = (
    "yes No ON off true null ~ y n 1 1_0 0x1F 1e3 1:30 .inf -1 - -- --- ... 2001-01-01 = << * & ! % @ ` a:b a: #x"
)
AWKWARD = ["", " a", "a ", "a #b", "a: b", "\x7f", "\x85", "\u2028", "\ufeff", "\U0001f600", '"', "\\", "a\nb\t\r\0"]
TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from([*MEANINGFUL.split(), *AWKWARD])
SCALARS = st.none() | st.booleans() | st.integers() | TEXTS
QUIETLY = settings(max_examples=60)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=10
)


@QUIETLY
@given(VALUES)
def test_what_is_written_is_read(value: object) -> None:
    assert list(yaml.safe_load_all(documents([value]))) == [value]


@QUIETLY
@given(st.lists(st.dictionaries(TEXTS, SCALARS, min_size=1, max_size=3), min_size=2, max_size=3), TEXTS)
def test_several_documents_under_a_comment(values: list[object], head: str) -> None:
    assert list(yaml.safe_load_all(documents(values, head.replace("\x00", "")))) == values


def test_comments_stand_above_what_they_are_about() -> None:
    text = documents(
        [
            {
                "a": Commented(1, "one\ntwo"),
                "b": [Commented({"c": 1, "d": Commented([2], "in it")}, "item"), Commented("x", "y")],
            }
        ]
    )
    assert (
        text
        == """\
# one
# two
a: 1
b:
  # item
  - c: 1
    # in it
    d:
      - 2
  # y
  - x
"""
    )


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError):
        documents([{"a": 1.5}])


def test_without_the_library_its_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ruamel.yaml", None)
    assert main(["submit", "--k8s", "--nodes", "2", "--image", "i", "train.py"]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.splitlines()[-1] == (
        "holdfast: HF117: holdfast submit --k8s needs ruamel.yaml: pip install 'holdfast[k8s]'"
    )
