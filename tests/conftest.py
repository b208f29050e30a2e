"""One process, 8 fake CPU devices, strict dtypes. The caller's own XLA_FLAGS may say another device count."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    # Nearly all of the suite's time is compiling; unoptimised machine code compiles twice as fast.
    "--xla_backend_optimization_level": "0",
}
for _flag, _value in _FLAGS.items():
    if _flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}={_value}".strip()

import jax  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
