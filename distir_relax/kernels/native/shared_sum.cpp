// Sums over RANKS ranks of one machine, through memory that they share.
//
// Each rank has an area. It writes its operand there, sets a flag, and waits for the flags of the others. Of a few
// elements each rank then adds all; there are two places for these, which calls take in turns: a rank that writes to
// the first again has seen the flags of the call between, so all have read what was there. Of more elements each rank
// adds a part, in pieces that fit, and reads the other parts when a second flag says that they are there. Operands are
// added in the order of the ranks, so all get the same bits.
#include <sched.h>
#include <time.h>

#include "call.h"
#include "vector.h"

constexpr int64_t SMALL_COUNT = SMALL / sizeof(DTYPE), PIECE_COUNT = PIECE / sizeof(DTYPE);
// Times that a rank looks at a flag before it lets others run, each time again.
constexpr int SPINS = 256;

// What a rank has written before it sets a flag is what others read after they have waited for it.
struct Area {
    alignas(64) int64_t operand_flag;
    alignas(64) int64_t result_flag;
    DTYPE small[2][SMALL_COUNT];
    DTYPE operand[PIECE_COUNT];
    DTYPE result[PIECE_COUNT];
};

// Which step waits, or -1; the last that has finished; nanoseconds in waits that have ended; and the begin of the last.
struct Waits {
    int64_t step, last, waited, seconds, nanoseconds;
};

static void set_flag(int64_t* flag, int64_t value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }

static void wait_for_flag(const int64_t* flag, int64_t value) {
    for (int spins = 0; __atomic_load_n(flag, __ATOMIC_ACQUIRE) < value;) {
#ifdef __x86_64__
        _mm_pause();
#endif
        if (spins < SPINS)
            spins++;
        else
            sched_yield();
    }
}

static void begin_wait(Waits* waits, int64_t step) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    waits->seconds = now.tv_sec;
    waits->nanoseconds = now.tv_nsec;
    __atomic_store_n(&waits->step, step, __ATOMIC_RELEASE);
}

static void end_wait(Waits* waits, int64_t step) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    waits->waited += (now.tv_sec - waits->seconds) * 1000000000 + now.tv_nsec - waits->nanoseconds;
    waits->last = step;
    __atomic_store_n(&waits->step, -1, __ATOMIC_RELEASE);
}

static void copy(DTYPE* to, const DTYPE* from, int64_t count) { __builtin_memcpy(to, from, count * sizeof(DTYPE)); }

static void add(DTYPE* to, const DTYPE* const (&operands)[RANKS], int64_t count) {
    each_vector(
        count, BODY(int64_t j, auto lanes) {
            F32 total = load(operands[0] + j, lanes);
            UNROLL (r, RANKS - 1) total = total + load(operands[r + 1] + j, lanes);
            store(to + j, total, lanes);
        });
}

static void sum_few(const DTYPE* x, DTYPE* y, int64_t count, Area& own, Area* const (&areas)[RANKS], int64_t* next) {
    int64_t call = *next;
    const DTYPE* operands[RANKS];
    for (int r = 0; r < RANKS; r++) operands[r] = areas[r]->small[call % 2];
    copy(own.small[call % 2], x, count);
    set_flag(&own.operand_flag, call);
    for (Area* area : areas) wait_for_flag(&area->operand_flag, call);
    add(y, operands, count);
    set_flag(next, call + 1);
}

static void sum_many(const DTYPE* x, DTYPE* y, int64_t count, int64_t rank, Area& own, Area* const (&areas)[RANKS],
                     int64_t* next) {
    int64_t call = *next;
    for (int64_t start = 0; start < count; start += PIECE_COUNT, call++) {
        int64_t size = min(count - start, PIECE_COUNT), part = divided_up(size, RANKS * LANES) * LANES;
        int64_t begin = min(rank * part, size), end = min((rank + 1) * part, size);
        copy(own.operand, x + start, size);
        set_flag(&own.operand_flag, call);
        for (Area* area : areas) wait_for_flag(&area->operand_flag, call);
        const DTYPE* operands[RANKS];
        for (int r = 0; r < RANKS; r++) operands[r] = areas[r]->operand + begin;
        add(own.result + begin, operands, end - begin);
        set_flag(&own.result_flag, call);
        for (int r = 0; r < RANKS; r++) {
            int64_t first = min(r * part, size), last = min((r + 1) * part, size);
            wait_for_flag(&areas[r]->result_flag, call);
            copy(y + start + first, areas[r]->result + first, last - first);
        }
    }
    set_flag(next, call);
}

// `next` has the number of this rank's next call, 1 at first and of all ranks alike; `step` is that of the program. The
// result may be x; `places` are the addresses of all areas.
static void shared_sum(const DTYPE* x, DTYPE* y, int64_t count, int64_t rank, int64_t* next, int64_t step, Waits* waits,
                       Area* const* places) {
    Area* areas[RANKS];
    for (int r = 0; r < RANKS; r++) areas[r] = places[r];
    begin_wait(waits, step);
    if (count <= SMALL_COUNT)
        sum_few(x, y, count, *areas[rank], areas, next);
    else
        sum_many(x, y, count, rank, *areas[rank], areas, next);
    end_wait(waits, step);
}
EXPORT(shared_sum)
