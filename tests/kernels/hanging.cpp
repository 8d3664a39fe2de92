// Does not end.
#include <unistd.h>

#include "../../distir_relax/kernels/native/call.h"

static void hanging() {
    for (;;) sleep(60);
}
EXPORT(hanging)
