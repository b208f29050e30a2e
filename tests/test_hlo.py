"""What is read from compiled programs: by hand-written text of each form, and by programs that XLA:CPU compiles here.
(`test_collectives.py` and `test_aot.py` hold whole training steps against the papers' formulas.)"""

from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import jzero
from jzero.hlo import collectives, crosses_nodes, instructions, loops, memory
from jzero.hlo.tpu_executable import program_bytes
from jzero.scopes import GRADIENTS

SIZES = {"replica": 2, "data": 4, "tensor": 1}
MESH = AbstractMesh(tuple(SIZES.values()), tuple(SIZES))
GRID = AbstractMesh((2, 2, 2), ("replica", "data", "tensor"))


def program(*lines: str, others: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule jit_step, num_partitions=8\n{others}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def one(line: str, mesh=MESH, others: str = ""):
    (found,) = collectives(program(f"%x = {line}", others=others), mesh)
    return found


GROUPS = [
    # The three forms of the same groups: each row of the mesh, each column, all.
    ("{{0,1,2,3},{4,5,6,7}}", MESH, ("data",), 4),
    ("{{0,4},{1,5},{2,6},{3,7}}", MESH, ("replica",), 2),
    ("{{7,6,5,4},{2,3,0,1}}", MESH, ("data",), 4),  # the order within a group has no say
    ("{}", MESH, ("replica", "data"), 8),
    ("[2,4]<=[8]", MESH, ("data",), 4),
    ("[4,2]<=[2,4]T(1,0)", MESH, ("replica",), 2),
    ("[1,8]<=[8]", MESH, ("replica", "data"), 8),
    ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", MESH, ("data",), 4),
    ("mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}", MESH, ("replica", "data"), 8),
    # Axes that XLA turned around, merged into one and cut again.
    ("mesh['axis_0'=1,'axis_1'=4,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_1'}", MESH, ("data",), 4),
    ("mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}", MESH, ("replica",), 2),
    ("mesh['axis_0'=4,'axis_1'=2], device_ids=(0,4,1,5,2,6,3,7) {'axis_0'}", MESH, ("data",), 4),
    ("mesh['axis_0'=8,'axis_1'=1] {'axis_0'}", MESH, ("replica", "data"), 8),
    ("mesh['axis_0'=8] {'axis_0':(2)4}", MESH, ("data",), 4),
    ("mesh['axis_0'=8] {'axis_0':(1)2}", MESH, ("replica",), 2),
    ("mesh['a'=8] {'a':(2)2}", GRID, ("data",), 2),
    ("mesh['a'=8] {'a':(1)2,'a':(4)2}", GRID, ("replica", "tensor"), 4),
    ("mesh['a'=2,'b'=4] {'a','b':(2)2}", GRID, ("replica", "tensor"), 4),
    # Of no set of axes: neighbours in pairs where the inner axis has four, and groups of several sizes.
    ("{{0,1},{2,3},{4,5},{6,7}}", MESH, None, 2),
    ("[4,2]<=[8]", MESH, None, 2),
    ("{{0,1,2},{3,4,5,6,7}}", MESH, None, 5),
]


@pytest.mark.parametrize(("groups", "mesh", "axes", "size"), GROUPS)
def test_groups_of_each_form_are_those_of_mesh_axes(groups, mesh, axes, size):
    found = one(f"f32[8] all-reduce(%p), channel_id=1, replica_groups={groups}, use_global_device_ids=true", mesh)
    assert (found.axes, found.group) == (axes, size)


def test_a_permutation_spans_the_axes_along_which_it_sends():
    along = lambda pairs: one(f"f32[8] collective-permute(%p), source_target_pairs={{{pairs}}}").axes
    assert along("{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}") == ("data",)
    assert along("{0,4},{1,5},{2,6},{3,7}") == ("replica",)


def test_only_groups_within_a_node_stay_in_it():
    assert not crosses_nodes(("data",), SIZES, 4)
    assert crosses_nodes(("data",), SIZES, 2)
    assert crosses_nodes(("replica",), SIZES, 4)
    assert crosses_nodes(("replica", "data"), SIZES, 4)
    assert not crosses_nodes(("replica", "data"), SIZES, 8)
    assert crosses_nodes(None, SIZES, 4)


ALL = "replica_groups=[1,8]<=[8]"
# operation -> (kind, shape of the result, bytes of the whole array, bytes a device sends)
PAYLOADS = [
    (f"f32[16]{{0}} all-gather(%p), {ALL}", "all-gather", (16,), 64, 56),
    (f"bf16[2]{{0}} reduce-scatter(%p), {ALL}", "reduce-scatter", (2,), 32, 28),
    (f"s8[16]{{0:T(8,128)}} all-reduce(%p), {ALL}", "all-reduce", (16,), 16, 28),
    (f"pred[] all-reduce(%p), {ALL}", "all-reduce", (), 1, 2),
    (f"f8e4m3fn[8,2]{{1,0}} all-to-all(%p), {ALL}", "all-to-all", (8, 2), 16, 14),
    ("s4[16]{0} collective-permute(%p), source_target_pairs={{0,1}}", "collective-permute", (16,), 8, 8),
]


@pytest.mark.parametrize(("line", "kind", "shape", "payload", "sent"), PAYLOADS)
def test_payloads_are_whole_arrays_and_what_is_sent_goes_around_a_ring(line, kind, shape, payload, sent):
    found = one(line)
    assert (found.kind, found.shape, found.payload_bytes, found.sent_bytes) == (kind, shape, payload, sent)


def test_an_asynchronous_pair_counts_once_by_what_it_returns():
    text = program(
        f"%a = (f32[2,3]{{1,0}}, f32[16,3]{{1,0}}) all-gather-start(%p), {ALL}",
        "%b = f32[16,3]{1,0} all-gather-done(%a)",
        f"%c = ((f32[16]{{0}}, f32[8]{{0}}), (f32[2]{{0}}, f32[1]{{0}})) reduce-scatter-start(%p, %q), {ALL}",
        "%d = (f32[2]{0}, f32[1]{0}) reduce-scatter-done(%c)",
        f"%e = f32[5]{{0}} all-reduce-start(%p), {ALL}",
        "%f = f32[5]{0} all-reduce-done(%e)",
        "%g = (f32[4], f32[4], u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1}}",
        "%h = ((f32[8]), f32[8], s32[]) async-start(%p), calls=%wrapped",
        "%i = f32[8] async-done(%h), calls=%wrapped",
        others=f"%wrapped (p: f32[8]) -> f32[8] {{\n  %t = f32[8] all-to-all(%p), {ALL}\n}}\n",
    )
    found = [(c.kind, c.shape) for c in collectives(text, MESH)]
    gathers, scatters = [("all-gather", (16, 3))], [("reduce-scatter", (2,)), ("reduce-scatter", (1,))]
    others = [("all-reduce", (5,)), ("collective-permute", (4,)), ("all-to-all", (8,))]
    assert found == [*gathers, *scatters, *others]


TPU = f"""
%all-reduce-scatter.3.clone (input: f32[64,8]) -> f32[16,8] {{
  %all-reduce.1 = f32[64,8] all-reduce(%input), channel_id=4, replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}
  ROOT %cut = f32[16,8] dynamic-slice(%all-reduce.1, %i)
}}

%copy_1 (p: f32[2]) -> f32[16] {{
  %a = f32[16] all-gather(%p), channel_id=9, {ALL}, metadata={{op_name="jit(step)/all_gather" stack_frame_id=7}}
}}

%copy_2 (p: f32[2]) -> f32[16] {{
  %b = f32[16] all-gather(%p), channel_id=9, {ALL}, metadata={{op_name="jit(step)/all_gather" stack_frame_id=7}}
}}
"""


def test_fusions_of_tpu_programs_are_the_reduce_scatter_and_the_gather_that_they_are():
    scatter = one("f32[16,8] fusion(%p), kind=kCustom, calls=%all-reduce-scatter.3.clone", others=TPU)
    assert (scatter.kind, scatter.shape, scatter.axes, scatter.elements) == ("reduce-scatter", (16, 8), ("data",), 512)
    spread = program(
        "%x = f32[16] fusion(%p), kind=kLoop, calls=%copy_1", "%y = f32[16] fusion(%p), calls=%copy_2", others=TPU
    )
    assert len(collectives(spread, MESH)) == 1


def name(op_name: str, arrays: str = "f32[16]", *, scoped: bool = True):
    scope = f"{GRADIENTS}/" if scoped else ""
    line = f'%x = {arrays} all-reduce(%p), {ALL}, metadata={{op_name="{op_name}" stack_frame_id=3}}'
    scopes = f'%z = f32[] add(%p, %p), metadata={{op_name="jit(step)/{scope}add"}}'
    return collectives(program(line, scopes), MESH)


S = f"jit(step)/{GRADIENTS}"
PHASES = [
    (f"{S}/jvp(jzero_gather[blocks/up/kernel])/sharding_constraint", "forward", "blocks/up/kernel"),
    (f"{S}/while/body/closed_call/jvp()/while/body/squeeze", "forward", None),
    (f"{S}/transpose(jvp())/while/body/checkpoint/rematted_computation/jzero_gather[w]/all_gather", "backward", "w"),
    (f"{S}/shard_map/jzero_scatter[out/kernel]/reduce_scatter", "backward", "out/kernel"),
    (f"{S}/shard_map/psum", "backward", None),
    (f"{S}/while/body/closed_call/add", "backward", None),
    ("jit(step)/reduce_sum", "update", None),
    ("jit(step)/while/body/dot_general", "update", None),  # Muon's iterations
]


@pytest.mark.parametrize(("op_name", "phase", "path"), PHASES)
def test_phase_and_parameter_are_those_of_the_scopes(op_name, phase, path):
    (found,) = name(op_name)
    assert (found.phase, found.source) == (phase, path or op_name)


def test_an_operation_that_bears_an_arguments_name_reads_that_parameter():
    """As a gather of jax 0.12 does, in the text of a program."""
    found = one(f"f32[16] all-gather(%p), {ALL}, metadata={{op_name=\"state.params[\\'blocks/up/kernel\\']\"}}")
    assert (found.phase, found.source) == ("forward", "blocks/up/kernel")


def test_a_phase_that_the_program_does_not_tell_is_none():
    (found,) = name("jit(f)/while/body/dot_general", scoped=False)
    assert found.phase is None
    (found,) = collectives(program(f"%x = f32[16] all-reduce(%p), {ALL}"), MESH)
    assert (found.phase, found.source) == (None, None)


def test_combined_operations_are_told_apart_where_xla_lists_their_names():
    both = name(f"{S}/(jvp(jzero_gather[a])/all_gather:transpose(jvp())/jzero_scatter[b]/add)", "(f32[16], f32[4])")
    assert [(c.shape, c.phase, c.source) for c in both] == [((16,), "forward", "a"), ((4,), "backward", "b")]
    # The name of one of three is no name of the others; the phase holds for all.
    three = name(f"{S}/transpose(jvp())/jzero_scatter[a]/reduce_scatter", "(f32[16], f32[4], f32[2])")
    assert {c.phase for c in three} == {"backward"}
    assert {c.source for c in three}.isdisjoint({"a"})


LOOPS = """
%body (p: f32[8]) -> f32[8] {
  %a = f32[8] all-reduce(%p), replica_groups={}
  %inner = f32[8] while(%p), condition=%less, body=%body_2, backend_config={"known_trip_count":{"n":"3"}}
}

%body_2 (p: f32[8]) -> f32[8] {
  %b = f32[4] all-reduce(%p), replica_groups={}
}

%unknown (p: f32[8]) -> f32[8] {
  %c = f32[2] all-reduce(%p), replica_groups={}
}

%less (p: f32[8]) -> pred[] {
  %d = pred[] compare(%p, %p), direction=LT
}
"""


def test_runs_multiply_over_the_loops_around():
    outer = '%outer = f32[8] while(%p), condition=%less, body=%body, backend_config={"known_trip_count":{"n":"5"}}'
    found = collectives(program(outer, "%w = f32[8] while(%p), condition=%less, body=%unknown", others=LOOPS), MESH)
    assert [(c.shape, c.loops, c.runs) for c in found] == [
        ((8,), ("outer",), 5),
        ((4,), ("outer", "inner"), 15),
        ((2,), ("w",), None),
    ]
    assert [c.sent_bytes for c in found] == [5 * 2 * 32 * 7 // 8, 15 * 2 * 16 * 7 // 8, None]


COUNTED = """
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8] get-tuple-element(%p), index=1
  %step = s32[] constant(STEP)
  %copied = s32[] copy(%i)
  %next = s32[] add(%copied, %step)
  %sum = f32[8] all-reduce(%x), replica_groups={}
  ROOT %t = (s32[], f32[8]) tuple(%next, %sum)
}

%less (p: (s32[], f32[8])) -> pred[] {
  %limit = s32[] constant(7)
  %q = (s32[], f32[8]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  ROOT %lt = pred[] compare(%j, %limit), direction=LT
}
"""


@pytest.mark.parametrize(
    ("start", "step", "runs"),
    [("constant(0)", "1", 7), ("constant(3)", "1", 4), ("constant(0)", "2", 4), ("add(%p, %p)", "1", None)],
)
def test_a_loop_whose_count_is_not_written_down_is_counted_where_all_is_constant(start, step, runs):
    """XLA:TPU writes down none."""
    given = [f"%start = s32[] {start}", "%moved = s32[] copy(%start)", "%given = (s32[], f32[8]) tuple(%moved, %p)"]
    loop = "%w = (s32[], f32[8]) while(%given), condition=%less, body=%body"
    (found,) = collectives(program(*given, loop, others=COUNTED.replace("STEP", step)), MESH)
    assert found.runs == runs


CARRY = """
%body (p: (f32[8], f32[4], f32[2])) -> (f32[8], f32[4], f32[2]) {
  %p = (f32[8], f32[4], f32[2]) parameter(0)
  %a = f32[8] get-tuple-element(%p), index=0
  %b = f32[4] get-tuple-element(%p), index=1
  %c = f32[2] get-tuple-element(%p), index=2
  %sum = f32[4] add(%b, %b)
  %same = f32[2] copy(%c)
  ROOT %t = (f32[8], f32[4], f32[2]) tuple(%a, %sum, /*index=2*/%same)
}
"""


def test_a_loop_changes_what_its_body_does_not_hand_on():
    (found,) = loops(program("%w = (f32[8], f32[4], f32[2]) while(%p), condition=%less, body=%body", others=CARRY))
    assert found.changed == (("f32", (4,)),)
    assert found.operation.name == "w"


FRAMES = """
FileNames
1 "/home/someone/model.py"
2 "/usr/lib/python3/site-packages/flax/nnx/linear.py"
3 "LIBRARY/usepoint.py"
4 "LIBRARY/models/decoder.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=1 end_column=9}
2 {file_name_id=2 function_name_id=1 line=99 end_line=99 column=1 end_column=9}
3 {file_name_id=3 function_name_id=1 line=60 end_line=60 column=1 end_column=9}
4 {file_name_id=4 function_name_id=1 line=34 end_line=34 column=1 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}
3 {file_location_id=3 parent_frame_id=2}
4 {file_location_id=4 parent_frame_id=3}
5 {file_location_id=2 parent_frame_id=5}

"""


@pytest.mark.parametrize(
    ("frame", "line"), [(1, "model.py:12"), (2, "model.py:12"), (3, None), (4, "decoder.py:34"), (5, None), (6, None)]
)
def test_an_operation_comes_from_the_innermost_line_that_is_no_librarys(frame, line):
    """And from none where jzero itself makes it, on behalf of whichever line."""
    made = f'%x = f32[16] all-reduce(%p), {ALL}, metadata={{op_name="a" stack_frame_id={frame}}}'
    tables = FRAMES.replace("LIBRARY", str(Path(jzero.__file__).parent))
    (found,) = collectives(program(made, others=tables), MESH)
    assert found.line == line


def mesh(**sizes: int) -> Mesh:
    devices = np.array(jax.devices()[:8]).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


@pytest.mark.parametrize(
    ("given", "wanted", "kind", "axes"),
    [
        (("data",), (), "all-gather", ("data",)),
        (("replica",), (), "all-gather", ("replica",)),
        (("replica", "data"), ("replica",), "all-gather", ("data",)),
        ((("data", "replica"),), (), "all-gather", ("replica", "data")),
        (("data", None), (None, "data"), "all-to-all", ("data",)),
    ],
)
def test_what_xla_makes_of_a_change_of_place_is_read_back(given, wanted, kind, axes):
    grid = mesh(replica=2, data=4)
    place = lambda spec: NamedSharding(grid, PartitionSpec(*spec))
    x = jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=place(given))
    text = jax.jit(lambda x: x, out_shardings=place(wanted)).lower(x).compile().as_text()
    assert text
    found = collectives(text, grid)
    assert {(c.kind, c.axes) for c in found} == {(kind, axes)}


def test_a_loop_of_products_is_read_back():
    grid = mesh(data=8)

    def product(x, weights):
        with jax.named_scope("jzero_gather[w]"):
            return jax.lax.scan(lambda x, w: (x @ jax.lax.all_gather(w, "data", tiled=True), None), x, weights)[0]

    specs = PartitionSpec("data"), PartitionSpec(None, "data")
    fn = jax.shard_map(product, mesh=grid, in_specs=specs, out_specs=specs[0])
    inputs = jax.ShapeDtypeStruct((16, 32), jnp.float32), jax.ShapeDtypeStruct((5, 32, 32), jnp.float32)
    compiled = jax.jit(fn).lower(*inputs).compile()
    (found,) = collectives(compiled.as_text() or "", grid)
    assert (found.kind, found.elements, found.axes, found.runs) == ("all-gather", 32 * 32, ("data",), 5)
    assert found.source == "w"
    assert found.sent_bytes == 5 * 4 * 32 * 32 * 7 // 8
    assert any(op.opcode == "while" and op.name in found.loops for op in instructions(compiled.as_text() or ""))


def test_memory_is_what_a_device_must_have_room_for():
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    found = memory(jax.jit(lambda x, y: ((x @ y) @ (y @ x), x + 1), donate_argnums=0).lower(x, x).compile(), "cpu")
    assert found.arguments == 2 * 4 * 256**2
    assert found.outputs - found.aliased >= 4 * 256**2
    assert found.temporaries >= 4 * 256**2
    assert found.peak == found.arguments + found.temporaries + found.outputs - found.aliased


def message(*fields: tuple[int, int | bytes]) -> bytes:
    """In protobuf's encoding."""

    def varint(number: int) -> bytes:
        return bytes([number & 0x7F | (0x80 if number > 0x7F else 0)]) + (varint(number >> 7) if number > 0x7F else b"")

    return b"".join(
        varint(number << 3) + varint(value)
        if isinstance(value, int)
        else varint(number << 3 | 2) + varint(len(value)) + value
        for number, value in fields
    )


# Of a TPU program: a heap with fragments, constants and code; the names of arrays fill more than a block.
ARRAYS = [(4, message((1, b"fusion.%d = fusion" % n), (4, 2**20))) for n in range(6000)]
PARTS = [
    (3, message((1, 3), (2, 3000000), (3, 700), *ARRAYS)),
    (3, message((1, 1), (2, 200))),
    (3, message((1, 5), (2, 9))),
]
MAIN = message((2, 3000209), *PARTS, (4, 2**34), (5, 12800), (6, 12300), (7, 12200), (8, 5))
VECTOR = message((1, 1), (2, 4096), (3, message((1, 3), (2, 4096))), (4, 2**27))
EXECUTABLE = message((1, b"names"), (8, bytes(range(256)) * 99), (12, message((1, VECTOR), (1, MAIN))), (18, 7))


def in_blocks(data: bytes) -> bytes:
    """As a Riegeli file holds it."""
    pieces = [data[at : at + 2**16 - 24] for at in range(0, len(data), 2**16 - 24)]
    header = bytes.fromhex("83af70d10d884a3f")
    return b"before" + b"".join(
        (header if n == 0 else b"\x0a" * 8) + bytes(16) + piece for n, piece in enumerate(pieces)
    )


@pytest.mark.parametrize("executable", [EXECUTABLE, in_blocks(EXECUTABLE)], ids=["plain", "in blocks"])
def test_a_tpu_executable_says_what_it_takes(executable):
    assert len(MAIN) > 2**17
    said = {"temp": 3000700, "argument": 12800, "output": 12300, "alias": 12200}

    def found(**other: int) -> int | None:
        sizes = {f"{name}_size_in_bytes": size for name, size in (said | other).items()}
        return program_bytes(executable, SimpleNamespace(**sizes))

    assert found() == 3000209
    # What does not agree with the compiler's own account is not believed.
    assert all(found(**{name: size + 1}) is None for name, size in said.items())
    assert program_bytes(executable[:100], SimpleNamespace(**{f"{name}_size_in_bytes": 0 for name in said})) is None


@pytest.mark.parametrize(("executable", "temporaries"), [(EXECUTABLE, 3000209), (b"", 3000700), (None, 3000700)])
def test_memory_on_tpu_is_the_executables_word_where_it_can_be_read(executable, temporaries):
    def serialize() -> bytes:
        if executable is None:
            raise jax.errors.JaxRuntimeError("UNIMPLEMENTED")
        return executable

    sizes = {"temp": 3000700, "argument": 12800, "output": 12300, "alias": 12200}
    compiled = SimpleNamespace(
        memory_analysis=lambda: SimpleNamespace(**{f"{name}_size_in_bytes": size for name, size in sizes.items()}),
        runtime_executable=lambda: SimpleNamespace(serialize=serialize),
    )
    assert memory(compiled, "tpu").peak == 12800 + temporaries + 100
    assert memory(compiled, "gpu").temporaries == 3000700
