"""The check of machine code that test_compile_only makes: it finds what a path leaves unset, and that alone."""

import pytest
from sass import unset_registers

# A loop that may be skipped sets UR4, and the one behind it reads that.
SKIPPED = """
        /*0000*/                   S2UR UR8, SR_CTAID.X ;
        /*0010*/                   UISETP.GE.AND UP0, UPT, UR8, 0x2, UPT ;
        /*0020*/              @!P0 BRA `(.L_x_1) ;
        /*0030*/                   UIADD3 UR4, UP1, UR8, 0x2, URZ ;
.L_x_0:
        /*0040*/                   UMOV UR6, UR4 ;
        /*0050*/               @P1 BRA `(.L_x_0) ;
.L_x_1:
        /*0060*/                   UIADD3 UR20, UP0, UR4, 0x2, URZ ;
        /*0070*/                   EXIT ;
"""


def test_a_register_that_a_path_leaves_unset_is_found():
    assert unset_registers(SKIPPED) == ["UIADD3 UR20, UP0, UR4, 0x2, URZ"]
    assert unset_registers(SKIPPED.replace("S2UR UR8, SR_CTAID.X", "ULDC.64 UR4, c[0x0][0x10]")) == [
        "UISETP.GE.AND UP0, UPT, UR8, 0x2, UPT",
        "UIADD3 UR4, UP1, UR8, 0x2, URZ",
    ]


PRODUCT = "HGMMA.64x8x16.F32.BF16 R8, gdesc[UR4], RZ, !UPT"
# What comes first, and what reads registers that it does not set.
READS = [
    ("CS2R R4, SRZ", "FADD R0, R4, R5", []),
    ("CS2R.32 R4, SR_CLOCKLO", "FADD R0, R4, R5", ["FADD R0, R4, R5"]),
    ("ULDC.64 UR10, c[0x0][0x208]", "LDG.E R0, desc[UR10][RZ.64]", []),
    ("LDG.E.128 R4, desc[URZ][RZ.64]", "FFMA R0, R5, R6, R7", []),
    ("LDG.E.64 R4, desc[URZ][RZ.64]", "STG.E desc[URZ][R4.64], R6", ["STG.E desc[URZ][R4.64], R6"]),
    ("IMAD.WIDE R4, RZ, RZ, RZ", "BAR.ARV R6, 0x120", ["BAR.ARV R6, 0x120"]),
    ("LDSM.16.M88.4 R4, [UR4]", "FADD R0, R4, R7", ["LDSM.16.M88.4 R4, [UR4]"]),
    ("REDUX.SUM UR4, RZ", "UMOV UR5, UR4", []),
    ("SHFL.BFLY PT, R4, RZ, 0x1, 0x1f", "LOP3.LUT P0, R0, R4, 0x1, RZ, 0xc0, !PT", []),
    ("NOP", "LOP3.LUT R7, R7, 0xfffffffd, RZ, 0xc0, !PT", []),
    ("LOP3.LUT R7, R7, 0xfffffffd, RZ, 0xc0, !PT", "LOP3.LUT R7, R7, 0x2, RZ, 0xfc, !PT", []),
    ("NOP", "LOP3.LUT R7, R7, 0xfffffffc, RZ, 0xc0, !PT", ["LOP3.LUT R7, R7, 0xfffffffc, RZ, 0xc0, !PT"]),
    ("NOP", "LOP3.LUT R7, R7, 0x7f, RZ, 0xc0, !PT", ["LOP3.LUT R7, R7, 0x7f, RZ, 0xc0, !PT"]),
    ("NOP", "LOP3.LUT R7, R8, 0xfffffffd, RZ, 0xc0, !PT", ["LOP3.LUT R7, R8, 0xfffffffd, RZ, 0xc0, !PT"]),
    ("NOP", "PRMT R7, RZ, 0x7610, R7", []),
    ("NOP", "PRMT R7, R8, 0x7610, R7", ["PRMT R7, R8, 0x7610, R7"]),
    ("NOP", "PRMT R7, RZ, 0x7610, R8", ["PRMT R7, RZ, 0x7610, R8"]),
    ("NOP", "PRMT R7, RZ, 0x5410, R7", ["PRMT R7, RZ, 0x5410, R7"]),
    ("ULDC.128 UR4, c[0x0][0x10]", PRODUCT, []),
    ("ULDC.64 UR6, c[0x0][0x10]", PRODUCT, [PRODUCT]),
    (PRODUCT, "FADD R0, R8, R11", [PRODUCT]),
]


def test_a_copy_to_a_uniform_register_of_what_is_unset_is_unset_and_found_where_it_is_computed_with():
    copy, use = "R2UR UR4, R8", "FADD R0, UR4, RZ"
    lines = ["ULDC.64 UR4, c[0x0][0x10]", copy, use, "EXIT"]
    code = "\n".join(f"        /*{16 * n:04x}*/                   {text} ;" for n, text in enumerate(lines))
    assert unset_registers(code) == [use]
    assert unset_registers(code.replace(copy, f"@UP4 {copy}")) == [f"@UP4 {copy}"]
    assert unset_registers(code.replace(use, "NOP")) == []


@pytest.mark.parametrize(("first", "then", "found"), READS, ids=lambda x: str(x)[:24])
def test_what_an_instruction_reads_and_sets(first, then, found):
    lines = [f"        /*{16 * n:04x}*/                   {text} ;" for n, text in enumerate((first, then, "EXIT"))]
    assert unset_registers("\n".join(lines)) == found


def test_every_target_of_a_computed_branch_is_followed():
    branch = """
        /*0000*/                   BRX R2 -0x2b0  (*"BRANCH_TARGETS .L_x_1,.L_x_2"*);
.L_x_1:
        /*0010*/                   EXIT ;
.L_x_2:
        /*0020*/                   FADD R0, R4, R4 ;
        /*0030*/                   EXIT ;
"""
    assert unset_registers(branch) == ['BRX R2 -0x2b0  (*"BRANCH_TARGETS .L_x_1,.L_x_2"*)', "FADD R0, R4, R4"]
