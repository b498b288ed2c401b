#include "kernels/reference/embed_reference.h"

#include "kernels/reference/float_elements.h"
#include "kernels/reference/linear_int_reference.h"

namespace optimc::reference {

void embed_float(const void* table, FloatType type, std::int64_t features, const std::int64_t* ids, float scale,
                 Rows out, std::int64_t rows) {
    for (std::int64_t m = 0; m < rows; ++m)
        for (std::int64_t c = 0; c < features; ++c)
            out.data[m * out.stride + c] = element(table, type, ids[m] * features + c) * scale;
}

void embed_int(const IntWeight& table, const std::int64_t* ids, float scale, Rows out, std::int64_t rows) {
    for (std::int64_t m = 0; m < rows; ++m) {
        for (std::int64_t c = 0; c < table.features; ++c) {
            const IntElement w = int_element(table, ids[m], c);
            out.data[m * out.stride + c] = static_cast<float>(w.code - w.zero) * w.scale * scale;
        }
    }
}

}  // namespace optimc::reference
