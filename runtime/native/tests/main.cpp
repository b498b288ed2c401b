// kernel_tests [FILTER [SHARE SHARES]]: runs every registered case, or those whose name contains FILTER; of those, every
// SHARES-th from the SHARE-th on, so that processes can divide them.
#include <cstdlib>

#include "isa/instruction_set.h"
#include "tests/check.h"

int main(int count, char** arguments) {
    using namespace optimc::test;
    const std::string filter = count > 1 ? arguments[1] : "";
    const int share = count > 3 ? std::atoi(arguments[2]) : 0;
    const int shares = count > 3 ? std::atoi(arguments[3]) : 1;
    std::printf("instruction sets:");
    for (optimc::InstructionSet set : optimc::supported_instruction_sets()) std::printf(" %s", optimc::name_of(set));
    std::printf("\n");
    int matched = 0, run = 0;
    for (const Case& test : cases()) {
        if (test.name.find(filter) == std::string::npos || matched++ % shares != share) continue;
        const int before = failures();
        test.run();
        ++run;
        if (failures() != before) std::printf("FAILED %s\n", test.name.c_str());
    }
    std::printf("%d cases, %d failed checks\n", run, failures());
    return run == 0 || failures() > 0;
}
