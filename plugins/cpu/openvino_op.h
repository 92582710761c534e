// What the OpenVINO wrappers of the operators share.
#pragma once

#include <array>
#include <sstream>
#include <string>
#include <vector>

#include "../operators/linear/block_forms.h"
#include "check.h"
#include "failure.h"
#include "kernels.h"
#include "openvino/op/op.hpp"

namespace redraft {

// An operator of this folder: evaluated on the host, with rows in its inputs' and outputs' first dimension.
class Operator : public ov::op::Op {
  public:
    using ov::op::Op::Op;

    bool has_evaluate() const override { return true; }
    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        try {
            run(outputs, inputs);
        } catch (const std::exception& error) {
            note_failure(error.what());
            throw;
        }
        return true;
    }
    // Sets the outputs' shapes and computes them. Throws an exception that names a wrong value.
    virtual void run(ov::TensorVector& outputs, const ov::TensorVector& inputs) const = 0;
    // The input that has as many rows as this output, or kUnknownRows.
    virtual int64_t rows_input(std::size_t) const { return 0; }
    static constexpr int64_t kUnknownRows = -1;
    // How many rows its outputs have for each row of that input.
    virtual int64_t rows_factor() const { return 1; }
};

enum Optional : std::size_t { kBias, kNorm, kNormBias, kResidual, kRows, kResidualRows, kIds, kOptionals };

// The tensors after the fixed inputs, named by the attribute `inputs`: "norm,residual" says that the next two are the
// norm weight and the residual. Names come in the enumeration's order.
class OptionalInputs {
  public:
    OptionalInputs() = default;
    OptionalInputs(const std::string& names, std::size_t first) : end_(first) {
        std::size_t next = 0;
        std::istringstream text(names);
        for (std::string name; std::getline(text, name, ',');) {
            while (next < kOptionals && name != kNames[next]) ++next;
            OPENVINO_ASSERT(next < kOptionals, "attribute inputs is '", names, "': '", name,
                            "' is unknown, repeated or out of order");
            inputs_[next++] = static_cast<int64_t>(end_++);
        }
    }

    // The input's number, or -1.
    int64_t find(Optional which) const { return inputs_[which]; }
    std::size_t end() const { return end_; }

    template <class T>
    const T* data(const ov::TensorVector& inputs, Optional which) const {
        return inputs_[which] < 0 ? nullptr : inputs[inputs_[which]].data<const T>();
    }
    // Throws an exception for an input of another number of elements.
    template <class T>
    const T* data(const ov::TensorVector& inputs, Optional which, std::size_t elements) const {
        OPENVINO_ASSERT(inputs_[which] < 0 || inputs[inputs_[which]].get_size() == elements, "the input ",
                        kNames[which], " has ", inputs[inputs_[which]].get_size(), " elements: expected ", elements);
        return data<T>(inputs, which);
    }

  private:
    static constexpr const char* kNames[] = {"bias", "norm", "norm_bias", "residual", "rows", "residual_rows", "ids"};
    std::array<int64_t, kOptionals> inputs_{-1, -1, -1, -1, -1, -1, -1};
    std::size_t end_ = 0;
};

// How a weight is stored, as an attribute says it: a dtype, or the forms and rows of blocks, "q4_k:1792,i4g128:256".
struct WeightStorage {
    DType dtype = DType::fp32;
    std::vector<BlockSegment> segments;

    WeightStorage() = default;
    explicit WeightStorage(const std::string& name);
    const BlockSegment* data() const { return segments.empty() ? nullptr : segments.data(); }
    int64_t count() const { return static_cast<int64_t>(segments.size()); }
    // Bytes of the packed weight.
    int64_t bytes(int64_t in_features, int64_t out_features, Activation activation) const {
        return segments.empty() ? packed_bytes(in_features, out_features, dtype, activation)
                                : packed_bytes(in_features, segments);
    }
};

inline DType parse_dtype(const std::string& name) {
    if (name == "fp32") return DType::fp32;
    OPENVINO_ASSERT(name == "bf16", "attribute dtype is '", name, "': expected fp32, bf16 or block forms");
    return DType::bf16;
}

inline BlockSegment parse_segment(const std::string& text) {
    const std::size_t colon = text.find(':'), digits = text.find_last_not_of("0123456789", colon - 1) + 1;
    const std::string name = text.substr(0, colon), rows = text.substr(colon + 1);
    const bool numbers = !rows.empty() && rows.size() < 10 && rows.find_first_not_of("0123456789") == std::string::npos;
    for (int32_t form = 0; numbers && form < kBlockFormCount; ++form) {
        const std::string known = kBlockFormNames[form];
        if (kBlockForms[form].span ? name == known
                                   : name.substr(0, digits) == known + "g" && digits < colon && colon - digits < 10)
            return {form, std::stoi(rows), kBlockForms[form].span ? 0 : std::stoi(name.substr(digits))};
    }
    OPENVINO_THROW("attribute dtype has '", text, "': expected a block form and rows, such as q4_k:1792 or i4g128:256");
}

inline WeightStorage::WeightStorage(const std::string& name) {
    if (name.find(':') == std::string::npos) {
        dtype = parse_dtype(name);
        return;
    }
    dtype = DType::blocks;
    std::istringstream parts(name);
    for (std::string part; std::getline(parts, part, ',');) segments.push_back(parse_segment(part));
}

inline void expect_type(const ov::Node* node, std::size_t input, ov::element::Type type) {
    OPENVINO_ASSERT(node->get_input_element_type(input) == type, node->get_friendly_name(), ": input ", input, " is ",
                    node->get_input_element_type(input), ": expected ", type);
}

inline void expect_elements(const ov::Node* node, std::size_t input, int64_t elements) {
    const ov::PartialShape& shape = node->get_input_partial_shape(input);
    if (shape.is_static())
        OPENVINO_ASSERT(static_cast<int64_t>(ov::shape_size(shape.to_shape())) == elements, node->get_friendly_name(),
                        ": input ", input, " has shape ", shape, ": expected ", elements, " elements");
}

}  // namespace redraft
