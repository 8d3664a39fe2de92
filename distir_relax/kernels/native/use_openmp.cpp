// Lets a module that TVM has compiled run its parallel loops on torch's threads.
//
// Such a module has a variable with the address of the function that runs its loops, which TVM sets when it loads the
// module: to one with threads of its own.
#include "call.h"

// What TVM passes to the body of a loop, beside the number of the thread.
struct Group {
    void* synchronization;
    int32_t threads;
};

typedef int (*Body)(int number, Group* group, void* data);

// Returns 0 if all went well.
static int run_loop(Body body, void* data, int threads) {
    if (!run_parallel) {
        Group group = {nullptr, 1};
        return body(0, &group, data);
    }
    struct Loop {
        Body body;
        void* data;
        int status;
    } loop = {body, data, 0};
    run_parallel(
        [](void* place) {
            Loop& of_threads = *(Loop*)place;
            Group group = {nullptr, thread_count()};
            if (int status = of_threads.body(thread_number(), &group, of_threads.data)) of_threads.status = status;
        },
        &loop, (unsigned)threads, 0);
    return loop.status;
}

static void use_openmp(void** variable) {
    if (run_parallel) *variable = (void*)&run_loop;
}
EXPORT(use_openmp)
