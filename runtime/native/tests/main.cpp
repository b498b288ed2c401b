// Runs every registered case, or those whose name contains the first argument.
#include <cstring>

#include "tests/check.h"

int main(int count, char** arguments) {
    using namespace optimc::test;
    int run = 0;
    for (const Case& test : cases()) {
        if (count > 1 && test.name.find(arguments[1]) == std::string::npos) continue;
        const int before = failures();
        test.run();
        ++run;
        if (failures() != before) std::printf("FAILED %s\n", test.name.c_str());
    }
    std::printf("%d cases, %d failed checks\n", run, failures());
    return run == 0 || failures() > 0;
}
