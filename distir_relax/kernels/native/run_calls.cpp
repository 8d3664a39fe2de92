// A loop over calls of kernels, by the function that calls one; the status is the first that is not 0.
#include "call.h"

struct Listed {
    void* kernel;
    const Argument* arguments;
    int32_t count, reserved;
};

static void run_calls(const Listed* calls, int64_t count, int (*function)(void*, const Argument*, int32_t, Argument*),
                      int64_t* status) {
    *status = 0;
    for (int64_t i = 0; i < count && *status == 0; i++) {
        Argument result = {};
        *status = function(calls[i].kernel, calls[i].arguments, calls[i].count, &result);
    }
}
EXPORT(run_calls)
