// Fills `count` elements with VALUE.
#include "../../distir_relax/kernels/native/call.h"

static void filling(float* x, int64_t count) {
    for (int64_t i = 0; i < count; i++) x[i] = VALUE;
}
EXPORT(filling)
