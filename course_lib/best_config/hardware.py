"""A cluster in a file, in the units of a data sheet.

cluster = load_cluster("ours.toml")             data/clusters/example.toml shows every key
save_cluster(fit(runs, cluster), "ours.toml")   with all constants of its software, so that a fit is kept

name = "ours"             base = "H100"         a preset of CLUSTERS, of which the file changes what it names
bf16_tflops = 989         fp8_tflops = 1979     dense; without FP8 the second is left out
memory_gib = 80           memory_tb_s = 3.35
node_link_gb_s = 450      network_gb_s = 50     a GPU's, in one direction, GB of 10^9 bytes; no network: left out
gpus_per_node = 8         matmul_factor = 1      attention_factor = 1: shares of the peak reached, over an H100's
[software]                                      constants by the names and in the units of `software.Software`
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
from decimal import Decimal
from pathlib import Path

from course_lib.best_config.clusters import CLUSTERS, Cluster
from course_lib.best_config.software import Software, check_software

UNITS = {  # a file's key: the field of Cluster, and how many of the field's units are one of the key's
    "bf16_tflops": ("peak_flops", 10**12),
    "fp8_tflops": ("fp8_flops", 10**12),
    "memory_gib": ("memory_bytes", 2**30),
    "memory_tb_s": ("memory_bandwidth", 10**12),
    "node_link_gb_s": ("node_link", 10**9),
    "network_gb_s": ("network", 10**9),
    "matmul_factor": ("matmul_factor", 1),
    "attention_factor": ("attention_factor", 1),
}
KEYS = ("name", "base", *UNITS, "gpus_per_node", "software")
OPTIONAL = ("base", "fp8_tflops", "network_gb_s", "matmul_factor", "attention_factor", "software")
ONE_KIND = "the planner takes clusters of one kind of GPU"


def number(where: str, value, unit: int = 1) -> float:
    """A number of a file, in the field's unit. Decimal until here, so that what was saved is loaded to the last bit.
    Raises ValueError for what is no finite number, or below 0.
    """
    try:
        found = float(value * unit) if type(value) in (int, Decimal) else math.nan
    except ArithmeticError:  # too large
        found = math.nan
    if not 0 <= found < math.inf:
        raise ValueError(f"{where} = {shown(value)}: not a number of 0 or more")
    return found


def shown(value) -> str:
    """A value of a file as it is said in an error: short, in one line."""
    text = str(value) if isinstance(value, Decimal) else json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:37]}..."


def check_known(file, names, known, what: str, others: dict[str, str] | None = None) -> None:
    """Raise ValueError for the first name that is none of the known, with the known name that is most like it. others:
    the known name for each of some other names, which a user may have meant.
    """
    meant = {name: name for name in known} | (others or {})
    for name in names:
        if name not in known:
            like = [f"; {meant[one]} is one" for one in difflib.get_close_matches(name, meant, 1)]
            raise ValueError(f"{file}: {name} is no {what}{''.join(like)}")


def constant(where: str, value, like):
    """A constant of a file's software, of the kind of Software's default."""
    if isinstance(like, tuple):
        if not isinstance(value, list) or len(value) != len(like):
            raise ValueError(f"{where} = {shown(value)}: not a list of {len(like)}")
        return tuple(constant(where, each, one) for each, one in zip(value, like, strict=True))
    if isinstance(like, (bool, str)):
        if type(value) is not type(like):
            raise ValueError(f"{where} = {shown(value)}: not {'true or false' if isinstance(like, bool) else 'a text'}")
        return value
    found = number(where, value)
    return value if type(value) is int and type(like) is int else found


def load_software(file, rows, base: Software) -> Software:
    """The constants of a file's [software], and the base's for those that it doesn't name."""
    if not isinstance(rows, dict):
        raise ValueError(f"{file}: software = {shown(rows)}: not a table")
    defaults = {field.name: field.default for field in dataclasses.fields(Software)}
    check_known(f"{file}: [software]", rows, defaults, "constant")
    found = {name: constant(f"{file}: software.{name}", value, defaults[name]) for name, value in rows.items()}
    software = dataclasses.replace(base, **found)
    try:
        check_software(software)
    except ValueError as error:
        raise ValueError(f"{file}: software.{error}") from None
    return software


def read_rows(file: Path | str) -> dict:
    """The keys of a cluster's file, and their values. Raises ValueError where it isn't TOML, has a key that is none, or
    more than one value of one.
    """
    try:
        with open(file, "rb") as stream:
            rows = tomllib.load(stream, parse_float=Decimal)
    except (ValueError, ArithmeticError) as error:
        raise ValueError(f"{file}: {error}") from None
    for key, value in rows.items():
        if isinstance(value, list):
            raise ValueError(f"{file}: {key} has {len(value)} values, but {ONE_KIND}: write a file for each")
        if isinstance(value, dict) and key != "software":
            raise ValueError(f"{file}: [{key}] is no table of a cluster: it has [software] alone, and {ONE_KIND}")
    check_known(file, rows, KEYS, "key of a cluster", {field: key for key, (field, _) in UNITS.items()})
    return rows


def load_cluster(file: Path | str) -> Cluster:
    """The cluster of a TOML file (this module's docstring has its keys, data/clusters/example.toml explains them).

    Raises ValueError, in one line that names file and key, for a key that is unknown, missing or of the wrong kind, a
    rate that is not above 0, software that can't be, or GPUs of several kinds; OSError where there is no such file.
    """
    rows = read_rows(file)
    base, gpus = rows.get("base"), rows.get("gpus_per_node")
    if base is not None and base not in CLUSTERS:
        raise ValueError(f"{file}: base = {shown(base)}: not one of {'; '.join(CLUSTERS)}")
    required = ["name"] if base else [key for key in KEYS if key not in OPTIONAL]
    if missing := [key for key in required if key not in rows]:
        raise ValueError(f"{file}: {', '.join(missing)} missing")
    if not isinstance(rows["name"], str) or not rows["name"]:
        raise ValueError(f"{file}: name = {shown(rows['name'])}: not a text")
    if gpus is not None and (type(gpus) is not int or gpus < 1):
        raise ValueError(f"{file}: gpus_per_node = {shown(gpus)}: not a whole number of 1 or more")
    found = vars(CLUSTERS[base]) if base else {"network": 0.0, "software": Software()}
    found = found | {"name": rows["name"], "software": load_software(file, rows.get("software", {}), found["software"])}
    for key, (field, unit) in UNITS.items():
        if key in rows:
            found[field] = number(f"{file}: {key}", rows[key], unit)
            if found[field] == 0 and key != "network_gb_s":
                raise ValueError(f"{file}: {key} = 0: not a number above 0")
    return Cluster(**found | ({"gpus_per_node": gpus} if gpus else {}))


def toml(value) -> str:
    """A constant as TOML."""
    if isinstance(value, tuple):
        return f"[{', '.join(toml(each) for each in value)}]"
    if isinstance(value, (bool, str)):
        return json.dumps(value, ensure_ascii=False)
    return str(int(value)) if isinstance(value, int) else repr(float(value))


def save_cluster(cluster: Cluster, file: Path | str) -> None:
    """Write a cluster so that `load_cluster` gives the same one: all its values, and all constants of its software."""
    lines = ["# A cluster for the planner. Units and keys: data/clusters/example.toml", f"name = {toml(cluster.name)}"]
    for key, (field, unit) in UNITS.items():
        value = getattr(cluster, field)
        if value is not None:
            lines.append(f"{key} = {(Decimal(repr(float(value))) / unit).normalize():f}")
    lines += [f"gpus_per_node = {cluster.gpus_per_node}", "", "[software]"]
    lines += [f"{field.name} = {toml(getattr(cluster.software, field.name))}" for field in dataclasses.fields(Software)]
    Path(file).write_text("\n".join(lines) + "\n", encoding="utf-8")
