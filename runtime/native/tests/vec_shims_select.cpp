#include <stdexcept>

#include "tests/vec_shims.h"

namespace optimc::test {

const VecShims& vec_shims(InstructionSet set) {
    switch (set) {
        case InstructionSet::portable: return *vec_shims_portable();
#if defined(OPTIMC_X86_KERNELS)
        case InstructionSet::avx2: return *vec_shims_avx2();
        case InstructionSet::avx512:
        case InstructionSet::avx512_bf16:
        case InstructionSet::amx: return *vec_shims_avx512();
#else
        default: break;
#endif
    }
    throw std::invalid_argument("no shims in this build");
}

}  // namespace optimc::test
