// Rows of a table, one element at a time.
#pragma once

#include "kernels/types.h"

namespace optimc::reference {

// Rows [0, rows) of out, rounded after each operation as the kernels do.
void embed_float(const void* table, FloatType type, std::int64_t features, const std::int64_t* ids, float scale,
                 Rows out, std::int64_t rows);
void embed_int(const IntWeight& table, const std::int64_t* ids, float scale, Rows out, std::int64_t rows);

}  // namespace optimc::reference
