// How a program, and a step of one, is refused.
#pragma once

#include <stdexcept>
#include <string>

namespace optimc {

[[noreturn]] inline void refuse(const std::string& reason) { throw std::invalid_argument(reason); }

inline void require(bool ok, const std::string& reason) {
    if (!ok) refuse(reason);
}

}  // namespace optimc
