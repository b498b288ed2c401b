// How bad input to native code is refused: Python sees a ValueError.
#pragma once

#include <stdexcept>
#include <string>

namespace optimc {

[[noreturn]] inline void refuse(const std::string& reason) { throw std::invalid_argument(reason); }

inline void require(bool ok, const std::string& reason) {
    if (!ok) refuse(reason);
}

}  // namespace optimc
