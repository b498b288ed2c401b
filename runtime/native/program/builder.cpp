#include "program/builder.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/kv_layout.h"
#include "program/ops/attention_op.h"
#include "require.h"

namespace optimc {

namespace {

std::string number(std::int64_t value) { return std::to_string(value); }

// Sizes that cannot overflow what is computed from them.
void require_size(std::int64_t value, const char* name) {
    require(value > 0 && value < (std::int64_t{1} << 31), std::string(name) + " " + number(value) + " is out of range");
}

}  // namespace

Builder::Builder(std::vector<KvLayerShape> layers, int block_size, std::int64_t num_blocks, std::int64_t capacity,
                 std::int64_t arena_bytes)
    : layers_(std::move(layers)), layer_used_(layers_.size()) {
    require(!layers_.empty(), "a program without attention layers");
    require(block_size > 0 && block_size <= 256, "block size " + number(block_size) + " is not in [1, 256]");
    require_size(num_blocks, "number of KV blocks");
    require_size(capacity, "capacity");
    require(arena_bytes > 0 && arena_bytes < (std::int64_t{1} << 46), "arena of " + number(arena_bytes) + " bytes");
    for (const KvLayerShape& layer : layers_) {
        require(layer.num_kv_heads > 0 && layer.num_kv_heads <= 4096 && layer.head_dim > 0 &&
                    layer.head_dim <= kMaxHeadDim,
                "a layer of " + number(layer.num_kv_heads) + " KV heads of " + number(layer.head_dim));
        require(!layer.channel_keys || kv_has_scales(layer.type), "key scales per channel for a type without scales");
    }
    parts_.capacity = capacity;
    parts_.arena_bytes = arena_bytes;
    pool_ = std::make_unique<KvPool>(layers_, block_size, num_blocks);
}

void Builder::kv_key_channels(int layer, std::int64_t heads, std::int64_t dim, const float* scales,
                              const float* minimums) {
    require(layer >= 0 && static_cast<std::size_t>(layer) < layers_.size(), "no KV layer " + number(layer));
    const KvLayerShape& shape = layers_[static_cast<std::size_t>(layer)];
    require(shape.channel_keys, "KV layer " + number(layer) + " has key scales per token");
    require(heads == shape.num_kv_heads && dim == shape.head_dim,
            "key scales [" + number(heads) + ", " + number(dim) + "], want [" + number(shape.num_kv_heads) + ", " +
                number(shape.head_dim) + "]");
    require((minimums != nullptr) == kv_has_minimums(shape.type),
            kv_has_minimums(shape.type) ? "keys of 4 bits need minimums" : "keys of 8 bits have no minimums");
    for (std::int64_t i = 0; i < heads * dim; ++i) {
        const bool usable = scales[i] > 0.0f && std::isfinite(scales[i]) &&
                            (minimums == nullptr || std::isfinite(minimums[i]));
        if (!usable) refuse("keys of head " + number(i / dim) + ", channel " + number(i % dim) + ": no usable scale");
    }
    pool_->set_key_channels(static_cast<std::size_t>(layer), scales, minimums);
}

int Builder::add_int_weight(const IntWeight& weight, std::int64_t bytes) {
    require_size(weight.outputs, "outputs");
    require_size(weight.features, "features");
    require_size(weight.group, "group");
    require(weight.bits == 4 || weight.bits == 8, "codes of " + number(weight.bits) + " bits");
    require(weight.zero_point >= 0 && weight.zero_point < (1 << weight.bits),
            "zero point " + number(weight.zero_point));
    const std::int64_t want = weight.panels() * weight.panel_bytes();
    require(bytes == want, number(bytes) + " bytes, want " + number(want));
    weights_.emplace_back(weight);
    return static_cast<int>(weights_.size()) - 1;
}

int Builder::add_float_weight(const FloatWeight& weight, std::int64_t bytes) {
    require_size(weight.outputs, "outputs");
    require_size(weight.features, "features");
    const std::int64_t element_bytes = weight.type == FloatType::float32 ? 4 : 2;
    const std::int64_t want = weight.panels() * kPanelRows * weight.features * element_bytes;
    require(bytes == want, number(bytes) + " bytes, want " + number(want));
    weights_.emplace_back(weight);
    return static_cast<int>(weights_.size()) - 1;
}

int Builder::add_table(const Table& table, std::int64_t bytes) {
    require_size(table.rows, "rows");
    require_size(table.features, "features");
    const std::int64_t want = table.rows * table.features * (table.type == FloatType::float32 ? 4 : 2);
    require(bytes == want, number(bytes) + " bytes, want " + number(want));
    weights_.emplace_back(table);
    return static_cast<int>(weights_.size()) - 1;
}

int Builder::add_vector(const Vector& vector) {
    require_size(vector.length, "length");
    weights_.emplace_back(vector);
    return static_cast<int>(weights_.size()) - 1;
}

int Builder::add_permutation(const Permutation& permutation) {
    require_size(permutation.length, "length");
    for (std::int64_t i = 0; i < permutation.length; ++i) {
        require(permutation.data[i] >= 0 && permutation.data[i] < permutation.length,
                "place " + number(i) + " takes feature " + number(permutation.data[i]) + " of " +
                    number(permutation.length));
    }
    weights_.emplace_back(permutation);
    return static_cast<int>(weights_.size()) - 1;
}

int Builder::add_float_buffer(RowsKind rows, std::int64_t width, std::int64_t offset) {
    require_size(width, "width");
    const FloatBuffer added{rows, width, offset};
    add_buffer(true, parts_.floats.size(), offset, added.bytes(parts_.capacity));
    parts_.floats.push_back(added);
    return static_cast<int>(buffers_.size()) - 1;
}

int Builder::add_quantized_buffer(RowsKind rows, std::int64_t features, std::int64_t group, int terms,
                                  std::int64_t offset) {
    require_size(features, "features");
    require_size(group, "group");
    require(terms == 1 || terms == 2, number(terms) + " terms");
    const QuantizedBuffer added{rows, features, group, terms, offset, true, 0};
    add_buffer(false, parts_.quantized.size(), offset, added.bytes(parts_.capacity));
    parts_.quantized.push_back(added);
    return static_cast<int>(buffers_.size()) - 1;
}

void Builder::embed(int table, float scale, View out) {
    require(table >= 0 && static_cast<std::size_t>(table) < weights_.size(), "no weight " + number(table));
    const Weight& chosen = weights_[static_cast<std::size_t>(table)];
    EmbeddingTable source;
    std::int64_t features = 0, vocabulary = 0;
    if (const auto* rows = std::get_if<Table>(&chosen)) {
        source = *rows, features = rows->features, vocabulary = rows->rows;
    } else if (const auto* panels = std::get_if<FloatWeight>(&chosen)) {
        source = *panels, features = panels->features, vocabulary = panels->outputs;
    } else {
        const auto& codes = weight_as<IntWeight>(table, "table");
        source = codes, features = codes.features, vocabulary = codes.outputs;
    }
    // A token id is looked up in every table.
    parts_.vocabulary = parts_.vocabulary == 0 ? vocabulary : std::min(parts_.vocabulary, vocabulary);
    add_op(EmbedOp(source, scale, resolve(out, features, RowsKind::tokens)));
}

void Builder::norm(View x, int weight, std::optional<int> bias, float epsilon, std::int64_t heads, bool centred,
                   std::optional<View> before, std::optional<View> after, std::optional<View> sum,
                   std::optional<View> out, std::optional<int> quantized, std::optional<int> permutation,
                   std::optional<float> quantized_scale) {
    require_size(heads, "heads");
    require(x.width % heads == 0, number(x.width) + " columns in " + number(heads) + " heads");
    require(out || quantized, "no output");
    require(quantized || !quantized_scale, "a scale of a quantized buffer that is not there");
    const RowsKind rows = rows_of(x);
    const std::int64_t width = x.width / heads;
    const Norm norm = {
        .weight = vector_data(weight, width),
        .bias = bias ? vector_data(*bias, width) : nullptr,
        .epsilon = epsilon,
        .width = width,
        .heads = heads,
        .centred = centred,
    };
    std::optional<int> target;
    if (quantized) {
        target = resolve_quantized(*quantized, x.width, rows);
        if (out || sum) parts_.quantized[static_cast<std::size_t>(*target)].replicable = false;
    }
    add_op(NormOp(norm, resolve(x, x.width, rows), resolve(before, x.width, rows), resolve(after, x.width, rows),
                  resolve(sum, x.width, rows), resolve(out, x.width, rows), target,
                  permutation_data(permutation, x.width), target ? fixed_scale(*target, quantized_scale) : 0.0f));
}

void Builder::quantize(View x, int quantized, std::optional<int> permutation, std::optional<float> scale) {
    const RowsKind rows = rows_of(x);
    const int target = resolve_quantized(quantized, x.width, rows);
    add_op(QuantizeOp(resolve(x, x.width, rows), target, permutation_data(permutation, x.width),
                      fixed_scale(target, scale)));
}

void Builder::linear(std::variant<View, int> x, int weight, std::optional<int> bias, std::optional<View> residual,
                     Gate gate, View out) {
    require(weight >= 0 && static_cast<std::size_t>(weight) < weights_.size(), "no weight " + number(weight));
    const RowsKind rows = rows_of(out);
    const Weight& chosen = weights_[static_cast<std::size_t>(weight)];
    std::variant<IntWeight, FloatWeight> matrix;
    std::int64_t features = 0, outputs = 0, group = 0;
    if (const auto* codes = std::get_if<IntWeight>(&chosen)) {
        matrix = *codes;
        features = codes->features, outputs = codes->outputs, group = codes->group;
    } else {
        matrix = weight_as<FloatWeight>(weight, "linear weight");
        features = std::get<FloatWeight>(matrix).features, outputs = std::get<FloatWeight>(matrix).outputs;
    }
    const std::int64_t panels = (outputs + kPanelRows - 1) / kPanelRows;
    if (gate == Gate::none) {
        require(out.width == outputs, number(out.width) + " columns for " + number(outputs) + " outputs");
    } else {
        require(panels % 2 == 0 && panels / 2 == (out.width + kPanelRows - 1) / kPanelRows && !residual,
                number(out.width) + " gated columns of " + number(panels) + " panels");
    }
    std::variant<View, int> source;
    if (const View* floats = std::get_if<View>(&x)) {
        source = resolve(*floats, features, rows);
    } else {
        require(group > 0, "a floating-point weight with quantized activations");
        const int index = resolve_quantized(std::get<int>(x), features, rows);
        const QuantizedBuffer& codes = parts_.quantized[static_cast<std::size_t>(index)];
        require(codes.group == group || (codes.group >= features && group >= features),
                "activations in groups of " + number(codes.group) + ", weights of " + number(group));
        require(codes.terms == 1 || gate == Gate::none, "a gate of a sum of two products");
        source = index;
    }
    add_op(LinearOp(matrix, source, bias ? vector_data(*bias, panels * kPanelRows) : nullptr,
                    resolve(residual, out.width, rows), gate, resolve(out, out.width, rows)));
}

void Builder::rotation(int frequencies, float scale, View out) {
    require_no_heads("positions");
    require(out.width % 2 == 0, "an odd number of rotated dimensions");
    add_op(RotationOp(vector_data(frequencies, out.width / 2), scale, resolve(out, out.width, RowsKind::tokens)));
}

void Builder::attention(const AttentionOptions& options, View q, View k, View v, std::optional<View> rotation,
                        View out) {
    require_no_heads("attention");
    const AttentionSpec& spec = options.spec;
    require(options.layer >= 0 && static_cast<std::size_t>(options.layer) < layers_.size(),
            "no KV layer " + number(options.layer));
    const auto layer = static_cast<std::size_t>(options.layer);
    require(!layer_used_[layer], "KV layer " + number(options.layer) + " is written twice");
    require(spec.num_kv_heads == layers_[layer].num_kv_heads && spec.head_dim == layers_[layer].head_dim,
            "heads differ from the KV layout of layer " + number(options.layer));
    require(!layers_[layer].channel_keys || pool_->layer(layer).has_channel_keys(),
            "KV layer " + number(options.layer) + " has no key scales yet");
    layer_used_[layer] = true;
    require(spec.num_heads > 0 && spec.num_heads <= 65536 && spec.num_heads % spec.num_kv_heads == 0,
            number(spec.num_heads) + " query heads for " + number(spec.num_kv_heads) + " KV heads");
    const std::int64_t rotary = rotation ? rotation->width : 0;
    require(rotary % 2 == 0 && rotary <= spec.head_dim && rotary == spec.rotary_dim,
            number(rotary) + " rotated dimensions of " + number(spec.head_dim));
    const std::int64_t q_width = std::int64_t{spec.num_heads} * spec.head_dim;
    const std::int64_t kv_width = std::int64_t{spec.num_kv_heads} * spec.head_dim;
    attentions_.push_back({spec, pool_->layer(layer), resolve(q, q_width, RowsKind::tokens),
                           resolve(k, kv_width, RowsKind::tokens), resolve(v, kv_width, RowsKind::tokens),
                           resolve(rotation, rotary, RowsKind::tokens), resolve(out, q_width, RowsKind::tokens),
                           options.logits_rows_only});
    parts_.ops.push_back(nullptr);  // made in `finish`, when the number of threads is known
}

void Builder::elementwise(std::vector<ElementwiseStep> steps, std::vector<View> inputs, std::vector<int> vectors,
                          View out) {
    require(!steps.empty() && steps.size() <= kMaxElementwiseSteps && inputs.size() <= kMaxElementwiseSteps,
            number(static_cast<std::int64_t>(steps.size())) + " steps");
    const RowsKind rows = rows_of(out);
    std::vector<View> resolved;
    for (const View& input : inputs) resolved.push_back(resolve(input, out.width, rows));
    std::vector<const float*> data;
    for (int vector : vectors) data.push_back(vector_data(vector, out.width));
    for (std::size_t i = 0; i < steps.size(); ++i) {
        const ElementwiseStep& step = steps[i];
        const auto below = [](int value, std::size_t limit) {
            return value >= 0 && static_cast<std::size_t>(value) < limit;
        };
        bool ok = true;
        if (step.op == ElementwiseOp::rows) ok = below(step.a, inputs.size());
        else if (step.op == ElementwiseOp::vector) ok = below(step.a, vectors.size());
        else if (step.op != ElementwiseOp::constant) ok = below(step.a, i) && (!is_binary(step.op) || below(step.b, i));
        require(ok, "step " + number(static_cast<std::int64_t>(i)) + " reads what is not there");
    }
    add_op(ElementwiseOperation(std::move(steps), std::move(resolved), std::move(data), resolve(out, out.width, rows)));
}

void Builder::gather_rows(View x, View out) {
    require_no_heads("a gather of rows");
    add_op(GatherRowsOp(resolve(x, out.width, RowsKind::tokens), resolve(out, out.width, RowsKind::logits)));
}

void Builder::permute(View x, int permutation, View out) {
    const RowsKind rows = rows_of(x);
    require(x.buffer != out.buffer, "in and out are the same buffer");
    add_op(PermuteOp(resolve(x, out.width, rows), permutation_data(permutation, out.width),
                     resolve(out, out.width, rows)));
}

void Builder::begin_heads(const std::vector<View>& inputs, int logits, std::int64_t count) {
    require(!parts_.heads, "the heads have begun already");
    require(!inputs.empty() && inputs.size() <= 1024, number(static_cast<std::int64_t>(inputs.size())) + " inputs");
    require(count > 0 && count <= parts_.capacity,
            number(count) + " heads in steps of at most " + number(parts_.capacity) + " rows");
    Heads heads{{}, {}, answer(logits), count};
    for (const View& input : inputs) heads.inputs.push_back(resolve(input, inputs.front().width, RowsKind::tokens));
    parts_.heads = std::move(heads);
}

std::unique_ptr<Program> Builder::finish(int logits, std::optional<View> hidden, const Kernels& kernels,
                                         int threads) {
    require(threads >= 1 && threads <= 1024, number(threads) + " threads");
    require(parts_.vocabulary > 0, "no embedding");
    parts_.logits = answer(logits);
    if (hidden) parts_.hidden = resolve(*hidden, hidden->width, RowsKind::logits);
    require(!parts_.heads || !parts_.heads->ops.empty(), "heads without operations");
    require(!parts_.heads || (hidden && hidden->width == parts_.heads->inputs.front().width),
            "heads that read hidden states the program does not answer");
    std::vector<std::pair<AttentionSpec, std::shared_ptr<AttentionPlan>>> plans;
    auto next = attentions_.begin();
    for (std::unique_ptr<Op>& op : parts_.ops) {
        if (op != nullptr) continue;
        const auto known = std::find_if(plans.begin(), plans.end(),
                                        [&](const auto& plan) { return plan.first == next->spec; });
        const bool is_new = known == plans.end();
        if (is_new) {
            plans.emplace_back(next->spec,
                               std::make_shared<AttentionPlan>(next->spec, threads, parts_.capacity, parts_.capacity));
        }
        const auto& plan = is_new ? plans.back().second : known->second;
        op = std::make_unique<AttentionOp>(next->spec, next->cache, plan, is_new, next->q, next->k, next->v,
                                           next->rotation, next->out, next->logits_rows_only);
        ++next;
    }
    return std::make_unique<Program>(std::move(parts_), std::move(pool_), kernels, threads);
}

template <typename T>
const T& Builder::weight_as(int index, const char* kind) const {
    require(index >= 0 && static_cast<std::size_t>(index) < weights_.size(), "no weight " + number(index));
    const T* found = std::get_if<T>(&weights_[static_cast<std::size_t>(index)]);
    require(found != nullptr, "weight " + number(index) + " is no " + kind);
    return *found;
}

const float* Builder::vector_data(int index, std::int64_t length) const {
    const Vector& vector = weight_as<Vector>(index, "vector");
    require(vector.length == length, "a vector of " + number(vector.length) + ", want " + number(length));
    return vector.data;
}

const std::int32_t* Builder::permutation_data(std::optional<int> index, std::int64_t length) const {
    if (!index) return nullptr;
    const Permutation& order = weight_as<Permutation>(*index, "permutation");
    require(order.length == length, "a permutation of " + number(order.length) + ", want " + number(length));
    return order.data;
}

const Builder::BufferRef& Builder::buffer(int index, bool is_float) const {
    require(index >= 0 && static_cast<std::size_t>(index) < buffers_.size(), "no buffer " + number(index));
    const BufferRef& found = buffers_[static_cast<std::size_t>(index)];
    require(found.is_float == is_float, "buffer " + number(index) + (is_float ? " is quantized" : " is not quantized"));
    return found;
}

void Builder::add_buffer(bool is_float, std::size_t index, std::int64_t offset, std::int64_t bytes) {
    require(offset >= 0 && offset % kAlignment == 0 && offset <= parts_.arena_bytes - bytes,
            "buffer " + number(static_cast<std::int64_t>(buffers_.size())) + ": " + number(bytes) + " bytes at " +
                number(offset) + " in an arena of " + number(parts_.arena_bytes));
    buffers_.push_back({is_float, static_cast<int>(index)});
}

View Builder::resolve(View given, std::int64_t width, RowsKind rows) const {
    const BufferRef& found = buffer(given.buffer, true);
    const FloatBuffer& owner = parts_.floats[static_cast<std::size_t>(found.index)];
    require(given.column >= 0 && given.width > 0 && given.width <= owner.width &&
                given.column <= owner.width - given.width,
            "columns " + number(given.column) + ".." + number(given.column + given.width) + " of buffer " +
                number(given.buffer) + ", which has " + number(owner.width));
    require(given.width == width, number(given.width) + " columns, want " + number(width));
    require(owner.rows == rows, "buffer " + number(given.buffer) + " has rows of another kind");
    return {found.index, given.column, given.width};
}

std::optional<View> Builder::resolve(std::optional<View> given, std::int64_t width, RowsKind rows) const {
    if (!given) return std::nullopt;
    return resolve(*given, width, rows);
}

RowsKind Builder::rows_of(const View& given) const {
    return parts_.floats[static_cast<std::size_t>(buffer(given.buffer, true).index)].rows;
}

int Builder::resolve_quantized(int given, std::int64_t features, RowsKind rows) const {
    const int index = buffer(given, false).index;
    const QuantizedBuffer& owner = parts_.quantized[static_cast<std::size_t>(index)];
    require(owner.features == features && owner.rows == rows,
            "quantized buffer " + number(given) + " has " + number(owner.features) + " features, want " +
                number(features));
    return index;
}

float Builder::fixed_scale(int target, std::optional<float> scale) const {
    if (!scale) return 0.0f;
    require(*scale > 0.0f && std::isfinite(*scale), "a static scale that is not positive and finite");
    require(parts_.quantized[static_cast<std::size_t>(target)].terms == 1, "a static scale for two terms");
    return *scale;
}

View Builder::answer(int given) const {
    const BufferRef& found = buffer(given, true);
    const FloatBuffer& owner = parts_.floats[static_cast<std::size_t>(found.index)];
    require(owner.rows == RowsKind::logits, "the logits are not computed for the rows that want them");
    return {found.index, 0, owner.width};
}

void Builder::require_no_heads(const char* what) const {
    require(!parts_.heads, std::string(what) + " among the operations of heads");
}

template <typename T>
void Builder::add_op(T op) {
    (parts_.heads ? parts_.heads->ops : parts_.ops).push_back(std::make_unique<T>(std::move(op)));
}

}  // namespace optimc
