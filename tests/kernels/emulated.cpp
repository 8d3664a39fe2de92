// Runs a kernel, whose file is SOURCE and function ENTRY, on memory that another process has written to a file.
//
// The file has the number of arguments and these, then the number of regions of memory and of each its address, size
// and content. The regions are mapped where they were, and are written back.
#include <stdio.h>
#include <sys/mman.h>

#include SOURCE

static int64_t number(FILE* file) {
    int64_t found = 0;
    return fread(&found, sizeof found, 1, file) == 1 ? found : -1;
}

int main(int, char** names) {
    FILE* file = fopen(names[1], "r+");
    static Argument arguments[64];
    int64_t count = number(file);
    if (fread(arguments, sizeof(Argument), count, file) != (size_t)count) return 2;
    struct Region {
        char* place;
        int64_t size;
        long offset;
    };
    static Region regions[4096];
    int64_t all = number(file);
    for (int64_t i = 0; i < all; i++) {
        char* place = (char*)number(file);
        regions[i] = {place, number(file), 0};
        regions[i].offset = ftell(file);
        constexpr int64_t PAGE = 65536;
        for (int64_t page = (int64_t)place / PAGE * PAGE; page < (int64_t)place + regions[i].size; page += PAGE)
            // Another region may have mapped it.
            mmap((void*)page, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        if (fread(place, 1, regions[i].size, file) != (size_t)regions[i].size) return 3;
    }
    Argument result = {};
    if (ENTRY(nullptr, arguments, (int32_t)count, &result)) return 4;
    for (int64_t i = 0; i < all; i++) {
        fseek(file, regions[i].offset, SEEK_SET);
        fwrite(regions[i].place, 1, regions[i].size, file);
    }
    return fclose(file);
}
