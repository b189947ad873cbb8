"""A cluster in a file, in the units of a data sheet.

cluster = load_cluster("ours.toml")             data/clusters/example.toml shows every key
save_cluster(fit(runs, cluster), "ours.toml")   with all constants of its software, so that a fit is kept

name = "ours"             base = "H100"         a preset of CLUSTERS, whose values hold for keys that are left out
bf16_tflops = 989         fp8_tflops = 1979     dense; without FP8 the second is left out
memory_gib = 80           memory_tb_s = 3.35
node_link_gb_s = 450      network_gb_s = 50     per GPU, in one direction, GB of 10^9 bytes; no network: left out
gpus_per_node = 8         matmul_factor = 1      attention_factor = 1: shares of the peak reached, over an H100's
[software]                                      constants by the names and in the units of `software.Software`
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

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
FORMER_NAMES = {  # of keys and constants in files that earlier versions wrote
    "product_factor": "matmul_factor", "products": "matmul_dtype", "kept_whole": "kept_outside_tp"
}  # fmt: skip


def to_number(where: str, value: Any, unit: int = 1) -> float:
    """Return a number of a file in the field's unit. The file's numbers are Decimal, so that a saved value is loaded to
    the last bit. Raises ValueError for values that are not finite numbers, or below 0.
    """
    try:
        number = float(value * unit) if type(value) in (int, Decimal) else math.nan
    except ArithmeticError:  # too large
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"{where} = {shown(value)}: not a number of 0 or more")
    return number


def shown(value: Any) -> str:
    """Return a value of a file for an error message: short, in one line."""
    text = str(value) if isinstance(value, Decimal) else json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:37]}..."


def check_known(
    file: Path | str, names: Iterable[str], known: Iterable[str], what: str, others: dict[str, str] | None = None
) -> None:
    """Raise ValueError for the first unknown name, with the known name that is most like it. others: the known name for
    each of some other names that a user may have meant.
    """
    meant = {name: name for name in known} | (others or {})
    for name in names:
        if name not in known:
            like = [f"; {meant[one]} is one" for one in difflib.get_close_matches(name, meant, 1)]
            raise ValueError(f"{file}: {name} is no {what}{''.join(like)}")


def to_constant(where: str, value: Any, default: Any) -> Any:
    """Return a constant of a file's software, with the type of Software's default."""
    if isinstance(default, tuple):
        if not isinstance(value, list) or len(value) != len(default):
            raise ValueError(f"{where} = {shown(value)}: not a list of {len(default)}")
        return tuple(to_constant(where, each, like) for each, like in zip(value, default, strict=True))
    if isinstance(default, (bool, str)):
        if type(value) is not type(default):
            kind = "true or false" if isinstance(default, bool) else "a text"
            raise ValueError(f"{where} = {shown(value)}: not {kind}")
        return value
    number = to_number(where, value)
    return value if type(value) is int and type(default) is int else number


def load_software(file: Path | str, rows: Any, base: Software) -> Software:
    """Return the constants of a file's [software], and the base's for those that the file does not name."""
    if not isinstance(rows, dict):
        raise ValueError(f"{file}: software = {shown(rows)}: not a table")
    rows = {FORMER_NAMES.get(name, name): value for name, value in rows.items()}
    defaults = {field.name: field.default for field in dataclasses.fields(Software)}
    check_known(f"{file}: [software]", rows, defaults, "constant")
    constants = {name: to_constant(f"{file}: software.{name}", value, defaults[name]) for name, value in rows.items()}
    software = dataclasses.replace(base, **constants)
    try:
        check_software(software)
    except ValueError as error:
        raise ValueError(f"{file}: software.{error}") from None
    return software


def read_rows(file: Path | str) -> dict[str, Any]:
    """Return the values of a cluster's file by key. Raises ValueError for a file that is not TOML, an unknown key, or
    several values of one key.
    """
    try:
        with open(file, "rb") as stream:
            rows = tomllib.load(stream, parse_float=Decimal)
    except (ValueError, ArithmeticError) as error:
        raise ValueError(f"{file}: {error}") from None
    rows = {FORMER_NAMES.get(key, key): value for key, value in rows.items()}
    for key, value in rows.items():
        if isinstance(value, list):
            raise ValueError(f"{file}: {key} has {len(value)} values, but {ONE_KIND}: write a file for each")
        if isinstance(value, dict) and key != "software":
            raise ValueError(f"{file}: [{key}] is no table of a cluster: it has [software] alone, and {ONE_KIND}")
    check_known(file, rows, KEYS, "key of a cluster", {field: key for key, (field, _) in UNITS.items()})
    return rows


def load_cluster(file: Path | str) -> Cluster:
    """Return the cluster of a TOML file (this module's docstring has its keys, data/clusters/example.toml explains
    them).

    Raises ValueError, in one line that names file and key, for a key that is unknown, missing or of the wrong kind, a
    rate that is not above 0, impossible software, or GPUs of several kinds; OSError if the file cannot be read.
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
    fields: dict[str, Any] = dict(vars(CLUSTERS[base])) if base else {"network": 0.0, "software": Software()}
    fields |= {"name": rows["name"], "software": load_software(file, rows.get("software", {}), fields["software"])}
    for key, (field, unit) in UNITS.items():
        if key in rows:
            fields[field] = to_number(f"{file}: {key}", rows[key], unit)
            if fields[field] == 0 and key != "network_gb_s":
                raise ValueError(f"{file}: {key} = 0: not a number above 0")
    return Cluster(**fields | ({"gpus_per_node": gpus} if gpus else {}))


def toml(value: Any) -> str:
    """Return a constant as TOML."""
    if isinstance(value, tuple):
        return f"[{', '.join(toml(each) for each in value)}]"
    if isinstance(value, (bool, str)):
        return json.dumps(value, ensure_ascii=False)
    return str(int(value)) if isinstance(value, int) else repr(float(value))


def save_cluster(cluster: Cluster, file: Path | str) -> None:
    """Write a cluster so that `load_cluster` returns the same: all its values, and all constants of its software."""
    lines = ["# A cluster for the planner. Units and keys: data/clusters/example.toml", f"name = {toml(cluster.name)}"]
    for key, (field, unit) in UNITS.items():
        value = getattr(cluster, field)
        if value is not None:
            lines.append(f"{key} = {(Decimal(repr(float(value))) / unit).normalize():f}")
    lines += [f"gpus_per_node = {cluster.gpus_per_node}", "", "[software]"]
    lines += [f"{field.name} = {toml(getattr(cluster.software, field.name))}" for field in dataclasses.fields(Software)]
    Path(file).write_text("\n".join(lines) + "\n", encoding="utf-8")
