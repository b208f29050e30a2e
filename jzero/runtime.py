"""The platform, fake devices and XLA flags: settled before the first JAX call, or refused."""

from __future__ import annotations

import logging
import os
import sys

from jzero.config import HOST_DEVICE_COUNT_FLAG, RuntimeConfig
from jzero.errors import ConfigError

logger = logging.getLogger(__name__)

# What JAX_PLATFORMS calls each platform; the first name is the one set.
_JAX_NAMES = {"cpu": ("cpu",), "gpu": ("cuda", "rocm", "gpu"), "tpu": ("tpu",)}


def start(runtime: RuntimeConfig) -> None:
    """Puts the runtime's settings in force, through JAX_PLATFORMS and XLA_FLAGS. Call it before using JAX.

    `platform: auto` leaves the choice to JAX, except with `fake_devices`: those only the CPU has, so it means
    cpu. Flags that XLA_FLAGS names already, the device count among them, win over the config's. Raises
    ConfigError where JAX_PLATFORMS contradicts the config, and where JAX has started its devices without the
    settings.
    """
    platform = "cpu" if runtime.platform == "auto" and runtime.fake_devices else runtime.platform
    wanted = [f"{HOST_DEVICE_COUNT_FLAG}={runtime.fake_devices}"] if runtime.fake_devices else []
    given = [flag.partition("=") for flag in os.environ.get("XLA_FLAGS", "").split()]
    named = {name: value for name, _, value in given}
    _warn_of_another_count(runtime.fake_devices, named.get(HOST_DEVICE_COUNT_FLAG))
    missing = [flag for flag in [*wanted, *runtime.xla_flags] if flag.partition("=")[0] not in named]
    if _jax_has_started():
        _check_in_force(runtime, platform, missing)
        return
    if runtime.fake_devices:
        _check_count(runtime.fake_devices)
    if platform != "auto":
        _choose_platform(runtime, platform)
    if missing:
        os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *missing])


def _warn_of_another_count(fake_devices: int | None, count: str | None) -> None:
    if fake_devices and count is not None and count != str(fake_devices):
        logger.warning(
            "runtime.fake_devices = %d: XLA_FLAGS has %s, set before or by an earlier start, and wins",
            fake_devices,
            count,
        )


def _jax_has_started() -> bool:
    """Whether JAX has made its devices, after which it reads none of these settings any more."""
    jax = sys.modules.get("jax")
    if jax is None:
        return False
    # JAX has no public way to ask. This setting may change before the start only; after it, update raises.
    count = jax.config.jax_num_cpu_devices
    try:
        jax.config.update("jax_num_cpu_devices", count + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", count)
    return False


def _check_in_force(runtime: RuntimeConfig, platform: str, missing: list[str]) -> None:
    import jax

    late = "JAX has started already; call jzero.runtime.start before any use of JAX, or drop the field"
    if platform not in ("auto", jax.default_backend()):
        field = f"runtime.platform = {runtime.platform}"
        if runtime.platform == "auto":
            field = f"runtime.fake_devices = {runtime.fake_devices}: needs the CPU"
        raise ConfigError(f"{field}, but JAX runs on {jax.default_backend()}: {late}")
    for flag in missing:
        name, _, value = flag.partition("=")
        if name != HOST_DEVICE_COUNT_FLAG:
            raise ConfigError(f"runtime.xla_flags = [{flag}]: not in XLA_FLAGS, and {late}")
        if jax.local_device_count() != int(value):
            count = f"runtime.fake_devices = {value}, but there are {jax.local_device_count()} CPU devices"
            raise ConfigError(f"{count}: {late}")


def _check_count(fake_devices: int) -> None:
    """JAX's own setting of the count would win without a word."""
    jax = sys.modules.get("jax")
    count = jax.config.jax_num_cpu_devices if jax else int(os.environ.get("JAX_NUM_CPU_DEVICES", -1))
    if count not in (-1, fake_devices):
        raise ConfigError(
            f"runtime.fake_devices = {fake_devices}: JAX_NUM_CPU_DEVICES = {count} contradicts it; unset one of the two"
        )


def _choose_platform(runtime: RuntimeConfig, platform: str) -> None:
    """JAX reads JAX_PLATFORMS when it is imported, jax.config.jax_platforms when it starts."""
    jax = sys.modules.get("jax")
    chosen = jax.config.jax_platforms if jax else os.environ.get("JAX_PLATFORMS")
    names = _JAX_NAMES[platform]
    if chosen and chosen.split(",")[0] not in names:
        asked = f"runtime.platform = {runtime.platform}"
        asked += f" with runtime.fake_devices = {runtime.fake_devices}" if runtime.fake_devices else ""
        raise ConfigError(f"{asked}: JAX_PLATFORMS = {chosen} contradicts it; unset one of the two")
    if not chosen:
        os.environ["JAX_PLATFORMS"] = names[0]
        if jax:
            jax.config.update("jax_platforms", names[0])
