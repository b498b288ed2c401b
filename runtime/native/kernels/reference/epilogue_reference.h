// The end of a product, one element at a time.
#pragma once

#include "kernels/types.h"

namespace optimc::reference {

// Stores row `row` of the output; `products` holds the row's product with every row of the panels, padding included.
void finish_row(const Epilogue& epilogue, std::int64_t row, const double* products);

}  // namespace optimc::reference
