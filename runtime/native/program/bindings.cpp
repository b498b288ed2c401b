// Python face of the cpu engine: checks shapes and dtypes, converts, releases the GIL while a step runs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "isa/instruction_set.h"
#include "kernels/select.h"
#include "program/builder.h"
#include "program/check_step.h"
#include "program/names.h"
#include "require.h"
#include "sampling/top_rows.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace optimc {

namespace {

template <typename T>
using Array1 = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Array2 = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes = Array1<std::uint8_t>;
using ViewTuple = std::tuple<int, std::int64_t, std::int64_t>;
using MaybeView = std::optional<ViewTuple>;

View to_view(const ViewTuple& t) { return {std::get<0>(t), std::get<1>(t), std::get<2>(t)}; }

std::optional<View> to_view(const MaybeView& t) {
    if (!t) return std::nullopt;
    return to_view(*t);
}

// KV heads, head dim, dtype, whose scales keys have.
using LayerTuple = std::tuple<int, int, std::string, std::string>;

std::vector<KvLayerShape> to_layers(const std::vector<LayerTuple>& layers) {
    std::vector<KvLayerShape> shapes;
    for (const auto& [heads, dim, dtype, keys] : layers) {
        shapes.push_back({heads, dim, named(kKvTypes, dtype, "KV dtype"), named(kKeyScales, keys, "key scales")});
    }
    return shapes;
}

// Builder and program, with the arrays they point into.
struct PyBuilder {
    std::unique_ptr<Builder> builder;
    std::vector<nb::object> owners;

    Builder& get() {
        require(builder != nullptr, "the program was built already");
        return *builder;
    }
};

struct PyProgram {
    std::unique_ptr<Program> program;
    std::vector<nb::object> owners;
    std::int64_t answered = 0;  // rows of the last step that wanted logits

    Program& get() {
        require(program != nullptr, "the program is closed");
        return *program;
    }
};

using Logits = nb::ndarray<nb::numpy, float, nb::ndim<2>>;

// Rows of the program's memory, which they keep alive.
Logits shared_rows(const Program& program, ConstRows rows, std::size_t count, std::int64_t width) {
    using Memory = std::shared_ptr<const std::byte[]>;
    auto memory = std::make_unique<Memory>(program.memory());
    const nb::capsule owner(memory.get(), [](void* held) noexcept { delete static_cast<Memory*>(held); });
    memory.release();
    return Logits(const_cast<float*>(rows.data), {count, static_cast<std::size_t>(width)}, owner,
                  {rows.stride, std::int64_t{1}});
}

// The array shares the program's memory: the next step overwrites it, `close` leaves it as it is.
Logits execute(PyProgram& self, Array1<std::int64_t> tokens, Array1<std::int64_t> positions, Array1<std::int64_t> slots,
               Array1<std::int32_t> query_start, Array1<std::int32_t> context_len, Array2<std::int32_t> block_table,
               Array1<std::int64_t> logits_rows, std::optional<Array2<bool>> tree_mask) {
    Program& program = self.get();
    const std::size_t num_tokens = tokens.shape(0);
    require(positions.shape(0) == num_tokens && slots.shape(0) == num_tokens,
            "positions and slots must be as long as tokens");
    require(query_start.shape(0) == context_len.shape(0) + 1 && block_table.shape(0) == context_len.shape(0),
            "query_start, context_len and block_table must agree on the number of sequences");
    require(!tree_mask || tree_mask->shape(0) == num_tokens, "tree_mask must have a row for every token");
    require(logits_rows.shape(0) <= static_cast<std::size_t>(program.capacity()), "more logits rows than rows");
    Step step = {
        .layout =
            {
                .num_tokens = static_cast<std::int64_t>(num_tokens),
                .num_sequences = static_cast<std::int64_t>(context_len.shape(0)),
                .positions = positions.data(),
                .slots = slots.data(),
                .query_start = query_start.data(),
                .context_len = context_len.data(),
                .block_table = block_table.data(),
                .table_width = static_cast<std::int64_t>(block_table.shape(1)),
                .tree_mask = tree_mask ? reinterpret_cast<const std::uint8_t*>(tree_mask->data()) : nullptr,
                .mask_width = tree_mask ? static_cast<std::int64_t>(tree_mask->shape(1)) : 0,
            },
        .tokens = tokens.data(),
        .logits_rows = logits_rows.data(),
        .num_logits = static_cast<std::int64_t>(logits_rows.shape(0)),
    };
    ConstRows logits;
    {
        nb::gil_scoped_release release;
        check_step(step, program.limits());
        logits = program.execute(step);
    }
    self.answered = static_cast<std::int64_t>(logits_rows.shape(0));
    return shared_rows(program, logits, logits_rows.shape(0), program.logits_width());
}

// Of the last step; overwritten by the next one.
Logits hidden(PyProgram& self) {
    Program& program = self.get();
    require(program.hidden().has_value(), "the program does not answer hidden states");
    return shared_rows(program, program.hidden_rows(), static_cast<std::size_t>(self.answered),
                       program.hidden()->width);
}

template <typename T>
nb::ndarray<nb::numpy, T, nb::ndim<3>> owned_candidates(std::unique_ptr<T[]> values, std::size_t rows,
                                                        std::size_t heads, std::size_t top) {
    const nb::capsule owner(values.get(), [](void* held) noexcept { delete[] static_cast<T*>(held); });
    return {values.release(), {rows, heads, top}, owner};
}

// As many rows at once as the program has room for; each row of `hidden` gets `count` rows of candidates.
nb::tuple draft(PyProgram& self, Array2<float> hidden, Array1<std::int64_t> tokens, std::int32_t top,
                std::optional<Array1<std::int32_t>> token_ids) {
    Program& program = self.get();
    require(program.heads().has_value(), "the program has no heads");
    const Heads& heads = *program.heads();
    const std::int64_t width = heads.inputs.front().width, vocabulary = heads.logits.width;
    const auto rows = static_cast<std::int64_t>(hidden.shape(0));
    require(rows > 0, "a draft for no rows");
    require(tokens.shape(0) == hidden.shape(0), "as many tokens as rows of hidden states");
    require(static_cast<std::int64_t>(hidden.shape(1)) == width,
            "hidden states of " + std::to_string(hidden.shape(1)) + ", want " + std::to_string(width));
    require(top >= 1 && top <= vocabulary,
            std::to_string(top) + " candidates of a draft vocabulary of " + std::to_string(vocabulary));
    require(!token_ids || static_cast<std::int64_t>(token_ids->shape(0)) == vocabulary,
            "token_ids must name every token of the draft vocabulary");
    const auto answers = static_cast<std::size_t>(rows * heads.count);
    const auto wanted = static_cast<std::size_t>(top);
    auto ids = std::make_unique_for_overwrite<std::int32_t[]>(answers * wanted);
    auto logprobs = std::make_unique_for_overwrite<float[]>(answers * wanted);
    {
        nb::gil_scoped_release release;
        const std::int64_t at_once = program.capacity() / heads.count;
        for (std::int64_t begin = 0; begin < rows; begin += at_once) {
            const std::int64_t some = std::min(at_once, rows - begin);
            const ConstRows logits = program.draft(hidden.data() + begin * width, tokens.data() + begin, some);
            const std::int64_t first = begin * heads.count * top;
            top_rows(logits.data, some * heads.count, static_cast<std::int32_t>(vocabulary), top, ids.get() + first,
                     logprobs.get() + first);
        }
        if (token_ids) {
            std::transform(ids.get(), ids.get() + answers * wanted, ids.get(),
                           [names = token_ids->data()](std::int32_t place) { return names[place]; });
        }
    }
    const auto count = static_cast<std::size_t>(heads.count);
    return nb::make_tuple(owned_candidates(std::move(ids), hidden.shape(0), count, wanted),
                          owned_candidates(std::move(logprobs), hidden.shape(0), count, wanted));
}

nb::bytes slot_bytes(PyProgram& self, std::int64_t slot) {
    KvPool& pool = self.get().pool();
    require(slot >= 0 && slot < pool.num_blocks() * pool.block_size(), "a slot is not in the pool");
    const std::vector<std::byte> bytes = pool.read_slot(slot);
    return nb::bytes(bytes.data(), bytes.size());
}

void move(PyProgram& self, Array1<std::int64_t> source, Array1<std::int64_t> target) {
    KvPool& pool = self.get().pool();
    require(source.shape(0) == target.shape(0), "as many source as target slots");
    const std::int64_t slots = pool.num_blocks() * pool.block_size();
    const auto in_pool = [slots](std::int64_t slot) { return slot >= 0 && slot < slots; };
    require(std::all_of(source.data(), source.data() + source.shape(0), in_pool) &&
                std::all_of(target.data(), target.data() + target.shape(0), in_pool),
            "a slot is not in the pool");
    nb::gil_scoped_release release;
    pool.move({source.data(), source.shape(0)}, {target.data(), target.shape(0)});
}

void bind_builder(nb::module_& m) {
    nb::class_<PyBuilder>(m, "ProgramBuilder", "Puts a cpu program together; ValueError names what does not fit.")
        .def(
            "__init__",
            [](PyBuilder* self, const std::vector<LayerTuple>& layers, int block_size, std::int64_t num_blocks,
               std::int64_t capacity, std::int64_t arena_bytes) {
                auto builder =
                    std::make_unique<Builder>(to_layers(layers), block_size, num_blocks, capacity, arena_bytes);
                new (self) PyBuilder{std::move(builder), {}};
            },
            nb::kw_only(), "layers"_a, "block_size"_a, "num_blocks"_a, "capacity"_a, "arena_bytes"_a)
        .def(
            "kv_channel_scales",
            [](PyBuilder& self, int layer, Array2<float> scales, std::optional<Array2<float>> minimums) {
                require(!minimums || (minimums->shape(0) == scales.shape(0) && minimums->shape(1) == scales.shape(1)),
                        "scales and minimums must have one shape");
                self.owners.push_back(nb::cast(scales));
                if (minimums) self.owners.push_back(nb::cast(*minimums));
                self.get().kv_key_channels(layer, static_cast<std::int64_t>(scales.shape(0)),
                                           static_cast<std::int64_t>(scales.shape(1)), scales.data(),
                                           minimums ? minimums->data() : nullptr);
            },
            "layer"_a, "scales"_a.noconvert(), "minimums"_a.noconvert().none())
        .def(
            "int_weight",
            [](PyBuilder& self, Bytes data, std::int64_t outputs, std::int64_t features, std::int64_t group, int bits,
               bool zeros, bool wide_scales, int zero_point) {
                self.owners.push_back(nb::cast(data));
                return self.get().add_int_weight(
                    {data.data(), outputs, features, group, bits, zeros, wide_scales, zero_point},
                    static_cast<std::int64_t>(data.shape(0)));
            },
            "data"_a.noconvert(), nb::kw_only(), "outputs"_a, "features"_a, "group"_a, "bits"_a, "zeros"_a,
            "wide_scales"_a, "zero_point"_a)
        .def(
            "float_weight",
            [](PyBuilder& self, Bytes data, std::int64_t outputs, std::int64_t features, const std::string& dtype) {
                self.owners.push_back(nb::cast(data));
                return self.get().add_float_weight({data.data(), outputs, features, named(kFloatTypes, dtype, "dtype")},
                                                   static_cast<std::int64_t>(data.shape(0)));
            },
            "data"_a.noconvert(), nb::kw_only(), "outputs"_a, "features"_a, "dtype"_a)
        .def(
            "table",
            [](PyBuilder& self, Bytes data, std::int64_t rows, std::int64_t features, const std::string& dtype) {
                self.owners.push_back(nb::cast(data));
                return self.get().add_table({data.data(), named(kFloatTypes, dtype, "dtype"), rows, features},
                                            static_cast<std::int64_t>(data.shape(0)));
            },
            "data"_a.noconvert(), nb::kw_only(), "rows"_a, "features"_a, "dtype"_a)
        .def(
            "vector",
            [](PyBuilder& self, Array1<float> data) {
                self.owners.push_back(nb::cast(data));
                return self.get().add_vector({data.data(), static_cast<std::int64_t>(data.shape(0))});
            },
            "data"_a.noconvert())
        .def(
            "permutation",
            [](PyBuilder& self, Array1<std::int32_t> data) {
                self.owners.push_back(nb::cast(data));
                return self.get().add_permutation({data.data(), static_cast<std::int64_t>(data.shape(0))});
            },
            "data"_a.noconvert())
        .def(
            "float_buffer",
            [](PyBuilder& self, const std::string& rows, std::int64_t width, std::int64_t offset) {
                return self.get().add_float_buffer(named(kRowsKinds, rows, "kind of rows"), width, offset);
            },
            "rows"_a, "width"_a, "offset"_a)
        .def(
            "quantized_buffer",
            [](PyBuilder& self, const std::string& rows, std::int64_t features, std::int64_t group, int terms,
               std::int64_t offset) {
                return self.get().add_quantized_buffer(named(kRowsKinds, rows, "kind of rows"), features, group, terms,
                                                       offset);
            },
            "rows"_a, "features"_a, "group"_a, "terms"_a, "offset"_a)
        .def(
            "embed",
            [](PyBuilder& self, int table, float scale, ViewTuple out) {
                self.get().embed(table, scale, to_view(out));
            },
            "table"_a, "scale"_a, "out"_a)
        .def(
            "norm",
            [](PyBuilder& self, ViewTuple x, int weight, std::optional<int> bias, float epsilon, std::int64_t heads,
               bool centred, MaybeView before, MaybeView after, MaybeView sum, MaybeView out,
               std::optional<int> quantized, std::optional<int> permutation, std::optional<float> quantized_scale) {
                self.get().norm(to_view(x), weight, bias, epsilon, heads, centred, to_view(before), to_view(after),
                                to_view(sum), to_view(out), quantized, permutation, quantized_scale);
            },
            "x"_a, nb::kw_only(), "weight"_a, "bias"_a.none(), "epsilon"_a, "heads"_a, "centred"_a, "before"_a.none(),
            "after"_a.none(), "sum"_a.none(), "out"_a.none(), "quantized"_a.none(), "permutation"_a.none(),
            "quantized_scale"_a.none() = nb::none())
        .def(
            "quantize",
            [](PyBuilder& self, ViewTuple x, int quantized, std::optional<int> permutation,
               std::optional<float> scale) {
                self.get().quantize(to_view(x), quantized, permutation, scale);
            },
            "x"_a, nb::kw_only(), "quantized"_a, "permutation"_a.none(), "scale"_a.none() = nb::none())
        .def(
            "linear",
            [](PyBuilder& self, MaybeView x, std::optional<int> quantized, int weight, std::optional<int> bias,
               MaybeView residual, const std::string& gate, ViewTuple out) {
                require(x.has_value() != quantized.has_value(), "give either x or quantized");
                std::variant<View, int> source;
                if (x) source = to_view(*x);
                else source = *quantized;
                self.get().linear(source, weight, bias, to_view(residual), named(kGates, gate, "gate"), to_view(out));
            },
            nb::kw_only(), "x"_a.none(), "quantized"_a.none(), "weight"_a, "bias"_a.none(), "residual"_a.none(),
            "gate"_a, "out"_a)
        .def(
            "rotation",
            [](PyBuilder& self, int frequencies, float scale, ViewTuple out) {
                self.get().rotation(frequencies, scale, to_view(out));
            },
            "frequencies"_a, "scale"_a, "out"_a)
        .def(
            "attention",
            [](PyBuilder& self, int layer, int num_heads, int num_kv_heads, int head_dim, float scale,
               std::int64_t window, float softcap, bool interleaved, bool logits_rows_only, MaybeView rotation,
               ViewTuple q, ViewTuple k, ViewTuple v, ViewTuple out) {
                require(window >= 0 && softcap >= 0, "window and softcap must not be negative");
                const AttentionSpec spec = {
                    .num_heads = num_heads,
                    .num_kv_heads = num_kv_heads,
                    .head_dim = head_dim,
                    .scale = scale,
                    .softcap = softcap,
                    .window = window,
                    .rotary_dim = rotation ? static_cast<int>(std::get<2>(*rotation)) : 0,
                    .interleaved = interleaved,
                };
                self.get().attention({spec, layer, logits_rows_only}, to_view(q), to_view(k), to_view(v),
                                     to_view(rotation), to_view(out));
            },
            nb::kw_only(), "layer"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "scale"_a, "window"_a, "softcap"_a,
            "interleaved"_a, "logits_rows_only"_a, "rotation"_a.none(), "q"_a, "k"_a, "v"_a, "out"_a)
        .def(
            "elementwise",
            [](PyBuilder& self, const std::vector<std::tuple<std::string, int, int, float>>& steps,
               const std::vector<ViewTuple>& inputs, const std::vector<int>& vectors, ViewTuple out) {
                std::vector<ElementwiseStep> converted;
                for (const auto& [op, a, b, value] : steps) {
                    converted.push_back({named(kElementwiseOps, op, "elementwise operation"), a, b, value});
                }
                std::vector<View> views;
                for (const ViewTuple& input : inputs) views.push_back(to_view(input));
                self.get().elementwise(std::move(converted), std::move(views), vectors, to_view(out));
            },
            nb::kw_only(), "steps"_a, "inputs"_a, "vectors"_a, "out"_a)
        .def(
            "gather_rows",
            [](PyBuilder& self, ViewTuple x, ViewTuple out) { self.get().gather_rows(to_view(x), to_view(out)); },
            "x"_a, "out"_a)
        .def(
            "permute",
            [](PyBuilder& self, ViewTuple x, int permutation, ViewTuple out) {
                self.get().permute(to_view(x), permutation, to_view(out));
            },
            "x"_a, nb::kw_only(), "permutation"_a, "out"_a)
        .def(
            "begin_heads",
            [](PyBuilder& self, const std::vector<ViewTuple>& inputs, int logits, std::int64_t count) {
                std::vector<View> views;
                for (const ViewTuple& input : inputs) views.push_back(to_view(input));
                self.get().begin_heads(views, logits, count);
            },
            nb::kw_only(), "inputs"_a, "logits"_a, "count"_a)
        .def(
            "finish",
            [](PyBuilder& self, int logits, MaybeView hidden_view, int threads, const std::string& instruction_set) {
                const Kernels& kernels = kernels_of(choose_instruction_set(instruction_set));
                auto program = self.get().finish(logits, to_view(hidden_view), kernels, threads);
                self.builder.reset();
                return std::make_unique<PyProgram>(PyProgram{std::move(program), std::move(self.owners)});
            },
            "logits"_a, nb::kw_only(), "hidden"_a.none() = nb::none(), "threads"_a, "instruction_set"_a);
}

}  // namespace

}  // namespace optimc

void bind_program(nb::module_& m) {
    using namespace optimc;
    m.def("supported_instruction_sets", [] {
        std::vector<std::string> names;
        for (InstructionSet set : supported_instruction_sets()) names.emplace_back(name_of(set));
        return names;
    });
    m.def("default_instruction_set", [] { return std::string(name_of(choose_instruction_set())); },
          "The set OPTIMC_ISA names, else the fastest this machine runs. Raises ValueError for a set it lacks.");
    m.def(
        "kv_block_bytes",
        [](const std::vector<LayerTuple>& layers, int block_size) {
            return KvPool::block_bytes(to_layers(layers), block_size);
        },
        nb::kw_only(), "layers"_a, "block_size"_a,
        "Bytes of one block over all layers of (KV heads, head dim, dtype, \"token\" or \"channel\"), scales included.");
    bind_builder(m);
    nb::class_<PyProgram>(m, "Program", "A program ready to run. Not thread-safe.")
        .def_prop_ro("threads", [](PyProgram& self) { return self.get().threads(); })
        .def_prop_ro("instruction_set", [](PyProgram& self) { return std::string(self.get().kernels().name); })
        .def("execute", &execute, nb::rv_policy::reference, "tokens"_a.noconvert(), "positions"_a.noconvert(),
             "slots"_a.noconvert(), "query_start"_a.noconvert(), "context_len"_a.noconvert(),
             "block_table"_a.noconvert(), "logits_rows"_a.noconvert(), "tree_mask"_a.noconvert().none(),
             "Run one step; the arrays are those of StepPlan. The logits [R, V] are overwritten by the next step.")
        .def("move", &move, "source"_a.noconvert(), "target"_a.noconvert())
        .def("hidden", &hidden, nb::rv_policy::reference, "What the last step's output head multiplied, [R, d].")
        .def("draft", &draft, "hidden"_a.noconvert(), "tokens"_a.noconvert(), "top"_a,
             "token_ids"_a.noconvert().none() = nb::none(),
             "The heads' likeliest candidates: ids and log-probabilities [N, K, top].")
        .def("populate_pool", [](PyProgram& self) { self.get().pool().populate(); },
             "Begin to have the system provide the pool's memory, beside everything else.")
        .def_prop_ro("is_pool_populated", [](PyProgram& self) { return self.get().pool().is_populated(); })
        .def("slot_bytes", &slot_bytes, "slot"_a, "What a slot of the pool holds in every layer.")
        .def("close", [](PyProgram& self) {
            self.program.reset();
            self.owners.clear();
        }, "Release threads, pool and weights.");
}
