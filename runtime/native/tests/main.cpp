// Runs every registered case, or those whose name contains the first argument.
#include "isa/instruction_set.h"
#include "tests/check.h"

int main(int count, char** arguments) {
    using namespace optimc::test;
    std::printf("instruction sets:");
    for (optimc::InstructionSet set : optimc::supported_instruction_sets()) std::printf(" %s", optimc::name_of(set));
    std::printf("\n");
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
