// Ends its process, as code for another processor would.
#include <unistd.h>

#include "../../distir_relax/kernels/native/call.h"

static void aborting() {
    if (write(2, "Illegal instruction\n", 20)) __builtin_trap();
}
EXPORT(aborting)
