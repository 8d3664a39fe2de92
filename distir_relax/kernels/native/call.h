// How kernels are called, and run in threads.
//
// A kernel is a function of TVM's foreign function interface: `EXPORT(name)` takes numbers and addresses from the
// caller.
#pragma once

#include <stdint.h>

// An argument is its type and its value.
struct Argument {
    int32_t type;
    int32_t reserved;
    union {
        int64_t integer;
        double number;
    };
};

constexpr int32_t FLOAT_ARGUMENT = 3;

template <class T> struct Value {
    static T of(const Argument& argument) {
        return (T)(argument.type == FLOAT_ARGUMENT ? argument.number : (double)argument.integer);
    }
};
template <> struct Value<int64_t> {
    static int64_t of(const Argument& argument) { return argument.integer; }
};
template <class T> struct Value<T*> {
    static T* of(const Argument& argument) { return (T*)argument.integer; }
};

struct Arguments {
    const Argument* following;
    template <class T> T next() { return Value<T>::of(*following++); }
};

// Braces evaluate their values in order.
struct Call {
    template <class... T> Call(void (*function)(T...), T... values) { function(values...); }
};

#define VISIBLE extern "C" __attribute__((visibility("default")))

// Of TVM's library.
extern "C" __attribute__((weak)) void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* message);

// Returns 0, or -1 for another number of arguments.
template <class... T> int call(void (*function)(T...), Arguments arguments, int32_t count) {
    if (count != sizeof...(T)) {
        TVMFFIErrorSetRaisedFromCStr("TypeError", "a kernel has another number of arguments");
        return -1;
    }
    Call{function, arguments.next<T>()...};
    return 0;
}

#define EXPORT(name)                                                                           \
    VISIBLE int __tvm_ffi_##name(void*, const Argument* arguments, int32_t count, Argument*) { \
        return call(name, {arguments}, count);                                                 \
    }

// ------------------------------------------------------------------------------------------------------- threads

// Functions of the OpenMP library that torch uses: GOMP_parallel, omp_get_thread_num and omp_get_num_threads. Threads
// of another library would wait for their next work, and take the cores from torch's.
static void (*run_parallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
static int (*thread_number)();
static int (*thread_count)();

template <class Body> __attribute__((noinline)) void run_in_thread(const Body& body, int64_t thread) {
    // Its variables are then registers.
    Body copied = body;
    copied(thread);
}

// Runs `body(t)` for each `t` below `threads`, at the same time if torch has threads.
template <class Body> void parallel(int64_t threads, const Body& body) {
    if (threads == 1 || !run_parallel) {
        for (int64_t t = 0; t < threads; t++) run_in_thread(body, t);
        return;
    }
    struct Loop {
        const Body& body;
        int64_t threads;
    } loop{body, threads};
    run_parallel(
        [](void* data) {
            const Loop& of_thread = *(const Loop*)data;
            for (int64_t t = thread_number(); t < of_thread.threads; t += thread_count())
                run_in_thread(of_thread.body, t);
        },
        &loop, (unsigned)threads, 0);
}

static void use_threads(void* run, void* number, void* count) {
    run_parallel = (decltype(run_parallel))run;
    thread_number = (decltype(thread_number))number;
    thread_count = (decltype(thread_count))count;
}
EXPORT(use_threads)

template <class T> inline T min(T a, T b) { return a < b ? a : b; }
template <class T> inline T max(T a, T b) { return a > b ? a : b; }
inline int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int up_to(int number, int step) { return (number + step - 1) / step * step; }
