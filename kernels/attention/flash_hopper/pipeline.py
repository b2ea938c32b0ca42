"""How the warps of a kernel hand tiles of shared memory to one another.

A ring is (buffers, landed, free): its use number n takes place in slot n modulo its slots. The loading warp acquires a
slot, the copy engine says at the slot's `landed` barrier that the tile is there, and the computing warpgroups release
the slot when they have read it: at an mbarrier, or at a named barrier of the hardware, before which a warpgroup need
not meet itself. `free` is the mbarriers, or the number of the first named barrier.
Source: FlashAttention-3 (arXiv:2407.08608), section 3.1; PTX ISA, mbarrier and bar.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# The first named barrier that Triton leaves free: it takes 0, 1 and one for each partition but the first.
FIRST_BARRIER: gl.constexpr = gl.constexpr(5)


@gluon.jit
def tiles_of(desc, COUNT: gl.constexpr):
    """Shared memory for so many blocks of a descriptor."""
    ROWS: gl.constexpr = desc.block_shape[2]
    COLUMNS: gl.constexpr = desc.block_shape[3]
    return gl.allocate_shared_memory(desc.dtype, [COUNT, 1, 1, ROWS, COLUMNS], desc.layout)


@gluon.jit
def numbers_of(desc, SLOTS: gl.constexpr):
    """Shared memory for so many blocks of a descriptor of numbers, one a row: what lands beside a ring's tiles."""
    return gl.allocate_shared_memory(desc.dtype, [SLOTS, desc.block_shape[0]], desc.layout)


@gluon.jit
def room_for_messages(ring):
    """Shared memory for messages of at most eight integers beside the uses of a ring.

    Twice its slots, so that the one of use n stays until use n + slots is released, after use n + 1 is over.
    """
    buffers, landed, free = ring
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.int32, [2 * landed.shape[0], 8], LAYOUT)


@gluon.jit
def make_ring(desc, SLOTS: gl.constexpr, COPIES: gl.constexpr, CONSUMERS: gl.constexpr, NAMED: gl.constexpr):
    """A ring whose slots hold COPIES blocks of a descriptor; NAMED is its first named barrier, None for mbarriers."""
    buffers = tiles_of(desc, SLOTS * COPIES)
    landed = mbarriers(SLOTS, 1)
    return buffers, landed, mbarriers(SLOTS, CONSUMERS) if NAMED is None else NAMED


@gluon.jit
def mbarriers(SLOTS: gl.constexpr, ARRIVALS: gl.constexpr):
    """So many, each for so many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(barriers.index(slot), ARRIVALS)
    return barriers


@gluon.jit
def _slot_and_phase(n, SLOTS: gl.constexpr):
    """Where use n takes place, and the parity of the laps before it. SLOTS is a power of two."""
    return n & (SLOTS - 1), (n & SLOTS) // SLOTS


@gluon.jit
def acquire(ring, n, CONSUMERS: gl.constexpr):
    """The loading warp: waits until use n may have its slot, and returns the slot."""
    buffers, landed, free = ring
    SLOTS: gl.constexpr = landed.shape[0]
    slot, phase = _slot_and_phase(n, SLOTS)
    if isinstance(free, gl.shared_memory_descriptor):
        mbarrier.wait(free.index(slot), phase ^ 1)
    elif n >= SLOTS:
        _sync(free + slot, 4 * CONSUMERS + 1)
    return slot


@gluon.jit
def fetch(ring, n, desc, b, h, row, CONSUMERS: gl.constexpr):
    """The loading warp: use n holds the rows from `row` of a head, in as many blocks as a slot has."""
    slot = acquire(ring, n, CONSUMERS)
    _copy(ring, slot, desc, b, h, row)


@gluon.jit
def fetch_with_message(ring, messages, n, message, desc, b, h, row, needed, CONSUMERS: gl.constexpr):
    """Writes `message`, a tuple of integers, beside use n, and fetches the tile too where it is needed."""
    buffers, landed, free = ring
    slot = acquire(ring, n, CONSUMERS)
    SIZE: gl.constexpr = messages.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([SIZE], [32], [1], [0])
    place = gl.arange(0, SIZE, LAYOUT)
    numbers = gl.zeros([SIZE], gl.int32, LAYOUT)
    for i in gl.static_range(len(message)):
        numbers = gl.where(place == i, message[i], numbers)
    messages.index(n & (messages.shape[0] - 1)).store(numbers)
    _meet_in_warp()  # its threads have all written before one of them says so
    if needed:
        _copy(ring, slot, desc, b, h, row)
    else:
        mbarrier.arrive(landed.index(slot))


@gluon.jit
def _copy(ring, slot, desc, b, h, row):
    buffers, landed, free = ring
    COPIES: gl.constexpr = buffers.shape[0] // landed.shape[0]
    ROWS: gl.constexpr = desc.block_shape[2]
    mbarrier.expect(landed.index(slot), COPIES * desc.block_type.nbytes)
    for copy in gl.static_range(COPIES):
        buffer = buffers.index(slot * COPIES + copy)
        tma.async_copy_global_to_shared(desc, [b, h, row + copy * ROWS, 0], landed.index(slot), buffer)


@gluon.jit
def fetch_with_numbers(ring, numbers, n, desc, numbers_desc, b, h, row, place, CONSUMERS: gl.constexpr):
    """As fetch, one block to a slot, and beside it a number for each of its rows, in `numbers_desc` from `place` on."""
    buffers, landed, free = ring
    slot = acquire(ring, n, CONSUMERS)
    mbarrier.expect(landed.index(slot), desc.block_type.nbytes + numbers_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [b, h, row, 0], landed.index(slot), buffers.index(slot))
    tma.async_copy_global_to_shared(numbers_desc, [place], landed.index(slot), numbers.index(slot))


@gluon.jit
def wait_for(ring, n, COPY: gl.constexpr = 0, needed=True):
    """A computing warpgroup: waits, if it is needed, for use n, and returns block COPY of it, rows x columns."""
    buffers, landed, free = ring
    SLOTS: gl.constexpr = landed.shape[0]
    COPIES: gl.constexpr = buffers.shape[0] // SLOTS
    slot, phase = _slot_and_phase(n, SLOTS)
    mbarrier.wait(landed.index(slot), phase, pred=needed)
    return buffers.index(slot * COPIES + COPY).reshape([buffers.shape[3], buffers.shape[4]])


@gluon.jit
def landed_anew(ring, n, COPY: gl.constexpr):
    """A computing warpgroup, after it has waited for use n: block COPY, rows x columns, at an address of its own.

    For a loop: ptxas 12.8 computes what two loops in sequence take from one address before the first of them alone,
    and where that is skipped the second reads registers that nobody set. It takes addresses behind shuffles for
    different ones, though it removes the shuffles in the end.
    """
    buffers, landed, free = ring
    SLOTS: gl.constexpr = landed.shape[0]
    COPIES: gl.constexpr = buffers.shape[0] // SLOTS
    slot, phase = _slot_and_phase(n, SLOTS)
    slot = gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [slot], dtype=gl.int32, is_pure=False, pack=1
    )
    return buffers.index(slot * COPIES + COPY).reshape([buffers.shape[3], buffers.shape[4]])


@gluon.jit
def resident(ring, COPY: gl.constexpr, ANEW: gl.constexpr = False):
    """A computing warpgroup, after it has waited for use 0 of a ring of one slot: block COPY, rows x columns.

    ANEW in a loop that is short of registers: the address is a constant, but not to LLVM, which would compute what
    follows from it before the first loop and keep it through all.
    """
    buffers, landed, free = ring
    if ANEW:
        zero = gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        buffer = buffers.index(zero + COPY)
    else:
        buffer = buffers.index(COPY)
    return buffer.reshape([buffers.shape[3], buffers.shape[4]])


@gluon.jit
def release(ring, n, CONSUMERS: gl.constexpr):
    """A computing warpgroup: it has read all of use n."""
    buffers, landed, free = ring
    slot, phase = _slot_and_phase(n, landed.shape[0])
    if isinstance(free, gl.shared_memory_descriptor):
        mbarrier.arrive(free.index(slot))
    else:
        _arrive(free + slot, 4 * CONSUMERS + 1)


@gluon.jit
def numbers_at(ring, numbers, n, LAYOUT: gl.constexpr):
    """A computing warpgroup, after it has waited for use n: the numbers that landed beside its tile."""
    buffers, landed, free = ring
    return numbers.index(n % landed.shape[0]).load(LAYOUT)


@gluon.jit
def message_at(messages, n):
    """A computing warpgroup, after it has waited for use n: the integers of its message, all that there is room for."""
    SIZE: gl.constexpr = messages.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([SIZE], [32], [4], [0])
    place = gl.arange(0, SIZE, LAYOUT)
    numbers = messages.index(n & (messages.shape[0] - 1)).load(LAYOUT)
    message = ()
    for i in gl.static_range(SIZE):
        message = message + (gl.sum(gl.where(place == i, numbers, 0), 0),)
    return message


@gluon.jit
def meet(barrier, CONSUMERS: gl.constexpr):
    """Waits until all computing warpgroups are here."""
    _sync(barrier, 4 * CONSUMERS)


@gluon.jit
def say(barrier, CONSUMERS: gl.constexpr):
    """A computing warpgroup: tells the one warp that hears, and goes on."""
    _arrive(barrier, 4 * CONSUMERS + 1)


@gluon.jit
def hear(barrier, CONSUMERS: gl.constexpr):
    """That warp: waits until all computing warpgroups have said so."""
    _sync(barrier, 4 * CONSUMERS + 1)


@gluon.jit
def take_turn(first_barrier, CONSUMER: gl.constexpr):
    """Waits until the warpgroup before this one has given the turn."""
    _sync(first_barrier + CONSUMER, 4 * 2)


@gluon.jit
def give_turn(first_barrier, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """Lets the warpgroup after this one take the turn."""
    _arrive(first_barrier + (CONSUMER + 1) % CONSUMERS, 4 * 2)


@gluon.jit
def _meet_in_warp():
    _ = gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _sync(barrier, WARPS: gl.constexpr):
    """Waits at a named barrier for so many warps, four to a warpgroup, those that arrive included."""
    _ = gl.inline_asm_elementwise(
        "bar.sync $1, $2; mov.b32 $0, 0;", "=r,r,r", [barrier, 32 * WARPS], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _arrive(barrier, WARPS: gl.constexpr):
    """Counts at a named barrier for so many warps, and goes on."""
    _ = gl.inline_asm_elementwise(
        "bar.arrive $1, $2; mov.b32 $0, 0;", "=r,r,r", [barrier, 32 * WARPS], dtype=gl.int32, is_pure=False, pack=1
    )
