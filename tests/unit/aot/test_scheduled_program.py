"""Programs as the compilers of TPUs and of GPUs print them: lines of real ones, shortened."""

import pytest

from torchacc.aot.scheduled_program import Instruction, cut_out, parse

KERNEL = (
    'metadata={op_name="model.1/model.layers.0.self_attn.7/xla__splash_attention.2/splash_mha_v_layout=1/pallas_call"}'
)
METADATA = 'metadata={op_name="transformer.1/transformer.h.0.attn.2/aten__mm.3/aten__mm"}'
CYCLES = 'backend_config={"flag_configs":[],"estimated_cycles":"%d"}'
TEXT = f"""HloModule IrToHlo.5301, is_scheduled=true

%all-reduce-scatter (input: f32[8192,256]) -> f32[1024,256] {{
  %input = f32[8192,256]{{1,0:T(8,128)S(1)}} parameter(0)
  %all-reduce.85 = f32[8192,256]{{1,0:T(8,128)}} all-reduce(%input), replica_groups={{{{0,1,2,3,4,5,6,7}}}}
  ROOT %dynamic-slice.257 = f32[1024,256]{{1,0:T(8,128)S(1)}} dynamic-slice(%all-reduce.85)
}}

%started (p: bf16[32,256]) -> bf16[256,256] {{
  %p = bf16[32,256]{{1,0}} parameter(0)
  ROOT %all-gather.1 = bf16[256,256]{{1,0}} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={{0}}
}}

%body (state: (s32[])) -> (s32[]) {{
  %state = (s32[]) parameter(0)
  ROOT %collective-permute-start.9 = (bf16[8]{{0}}, bf16[8]{{0}}, u32[], u32[]) collective-permute-start(%state)
}}

ENTRY %main (p0: bf16[32,256]) -> f32[] {{
  %p0 = bf16[32,256]{{1,0}} parameter(0), {METADATA}
  %async-collective-start.4 = (bf16[32,256]{{1,0}}, bf16[256,256]{{1,0}}, /*index=5*/u32[]) fusion(%p0), calls=%started
  %work = bf16[4,4]{{1,0}} fusion(%p0), calls=%nothing, {METADATA}, {CYCLES % 700}
  %get-tuple-element.1 = u32[] get-tuple-element(%async-collective-start.4), index=2
  %more = f32[2,3]{{1,0}} fusion(%work), {CYCLES % 30}
  %kernel = f32[2,3]{{1,0}} custom-call(%work), {KERNEL}
  %async-collective-done.4 = bf16[256,256]{{1,0}} fusion(%get-tuple-element.1), calls=%nothing
  %after = f32[2,3]{{1,0}} fusion(%more), {CYCLES % 5}
  %loop = (s32[]) while(%after), condition=%nothing, body=%body, {'backend_config={"known_trip_count":{"n":"3"}}'}
  ROOT %fusion.4 = f32[1024,256]{{1,0:T(8,128)S(1)}} fusion(%after), kind=kCustom, calls=%all-reduce-scatter
}}
"""


@pytest.fixture(scope="module")
def program():
    return parse(TEXT)


def test_cycles_are_those_of_the_entry_and_its_loops(program):
    assert program.cycles == 735


def test_what_a_module_computes_bears_its_name(program):
    names = {each.name: each.module for each, _ in program.runs()}
    assert names["work"] == "transformer.h.0.attn"
    assert names["more"] == ""
    assert names["kernel"] == "model.layers.0.self_attn"


def test_a_started_exchange_has_what_runs_before_its_end_beside_it(program):
    gather = next(each for each in program.collectives() if each.kind == "all-gather")
    assert (gather.num_bytes, gather.group_size, gather.is_asynchronous) == (256 * 256 * 2, 4, True)
    assert gather.cycles_beside == 730
    assert gather.wire_bytes == 256 * 256 * 2 * 3 / 4


def test_an_all_reduce_of_which_a_slice_is_kept_is_a_reduce_scatter(program):
    scatter = next(each for each in program.collectives() if each.kind == "reduce-scatter")
    assert (scatter.num_bytes, scatter.is_asynchronous) == (1024 * 256 * 4, False)
    assert scatter.wire_bytes == 8192 * 256 * 4 * 7 / 8


def test_a_loop_exchanges_as_often_as_it_runs(program):
    assert sum(each.kind == "collective-permute" for each in program.collectives()) == 3


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, x", [[0, 1], [2, 3]]),
        ("replica_groups=[2,4]<=[8], x", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=[4,2]<=[2,4]T(1,0), x", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=[1,8]<=[2,2,2]T(2,0,1)", [[0, 2, 4, 6, 1, 3, 5, 7]]),
        ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
        ("replica_groups={}, x", []),
    ],
)
def test_groups_are_read_as_xla_writes_them(written, groups):
    assert Instruction("gather", "f32[8]", "all-gather", f"%p), {written}").groups == groups


NESTED = """HloModule nested, is_scheduled=true

%inner (state: (s32[])) -> (s32[]) {
  %state = (s32[]) parameter(0)
  ROOT %same = (s32[]) fusion(%state), calls=%nothing
}

%outer (state.1: (s32[])) -> (s32[]) {
  %state.1 = (s32[]) parameter(0)
  ROOT %loop.1 = (s32[]) while(%state.1), condition=%never, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
}

ENTRY %main (p: (s32[])) -> (s32[]) {
  %p = (s32[]) parameter(0)
  ROOT %loop = (s32[]) while(%p), condition=%never, body=%outer, backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_a_loop_within_a_loop_runs_as_often_as_both():
    # What counts each body once has the inner one once; with the outer one's other runs, three times.
    assert list(parse(NESTED).loops()) == [("outer", 2), ("inner", 12)]


def test_a_loops_body_is_cut_out_with_what_it_calls():
    whole, part = parse(NESTED), parse(cut_out(NESTED, "outer"))
    assert part.entry == "outer"
    assert part.computations == {name: whole.computations[name] for name in ("inner", "outer")}
    assert list(parse(cut_out(NESTED, "inner")).computations) == ["inner"]


GATHERED = "all-gather-start(%p0, %p1), replica_groups=[1,8]<=[8], dimensions={0}"
GPU_TEXT = f"""HloModule IrToHlo.12, is_scheduled=true

%async_computation (param: bf16[64,32]) -> bf16[8,32] {{
  %param = bf16[64,32]{{1,0}} parameter(0)
  ROOT %reduce-scatter = bf16[8,32]{{1,0}} reduce-scatter(%param), replica_groups=[1,8]<=[8], dimensions={{0}}
}}

ENTRY %main (p0: bf16[4,32], p1: f32[2,8]) -> f32[] {{
  %p0 = bf16[4,32]{{1,0}} parameter(0)
  %p1 = f32[2,8]{{1,0}} parameter(1)
  %g = ((bf16[4,32]{{1,0}}, f32[2,8]{{1,0}}), (bf16[32,32]{{1,0}}, f32[16,8]{{1,0}})) {GATHERED}, x={{"is_sync":true}}
  %all-gather-done = (bf16[32,32]{{1,0}}, f32[16,8]{{1,0}}) all-gather-done(%g)
  %reduce-scatter-start = ((bf16[64,32]{{1,0}}), bf16[8,32]{{1,0}}) async-start(%p0), calls=%async_computation
  %work = f32[] fusion(%p1), kind=kInput, calls=%nothing
  %reduce-scatter-done = bf16[8,32]{{1,0}} async-done(%reduce-scatter-start)
  %all-reduce-start = (f32[3]{{0}}, f32[5]{{0}}) all-reduce-start(%work, %work), replica_groups=[1,8]<=[8]
  ROOT %all-reduce-done = (f32[3]{{0}}, f32[5]{{0}}) all-reduce-done(%all-reduce-start)
}}
"""


def test_exchanges_of_several_arrays_between_gpus_are_whole():
    found = {each.kind: each for each in parse(GPU_TEXT).collectives()}
    assert {kind: each.num_bytes for kind, each in found.items()} == {
        "all-gather": 32 * 32 * 2 + 16 * 8 * 4,
        "reduce-scatter": 8 * 32 * 2,
        "all-reduce": (3 + 5) * 4,
    }
    assert {each.group_size for each in found.values()} == {8}


def test_an_exchange_that_a_gpu_waits_for_is_marked():
    found = {each.kind: each.is_asynchronous for each in parse(GPU_TEXT).collectives()}
    assert found == {"all-gather": False, "reduce-scatter": True, "all-reduce": True}


def test_a_loop_whose_count_is_not_told_runs_until_its_counter_reaches_its_limit():
    program = parse(
        """
%below (state: (s32[])) -> pred[] {
  %limit = s32[]{:T(128)} constant(32), metadata={op_name="xla__scan"}
  %state = (s32[]{:T(128)}) parameter(0)
  %counter = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %compare.87 = pred[]{:T(512)} compare(%counter, %limit), direction=LT
}

%body (state: (s32[])) -> (s32[]) {
  ROOT %step = (s32[]) fusion(%state), backend_config={"estimated_cycles":"5"}
}

ENTRY %main (p0: s32[]) -> (s32[]) {
  ROOT %while.7 = (s32[]{:T(128)}) while(%p0), condition=%below, body=%body
}
"""
    )
    assert program.cycles == 32 * 5


def test_a_text_without_a_program_is_refused():
    with pytest.raises(ValueError, match="no entry"):
        parse("HloModule nothing\n")
