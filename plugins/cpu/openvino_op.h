// What the OpenVINO wrappers of the operators share.
#pragma once

#include <string>
#include <vector>

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

inline DType parse_dtype(const std::string& name) {
    if (name == "fp32") return DType::fp32;
    if (name == "bf16") return DType::bf16;
    if (name == "int8") return DType::int8;
    OPENVINO_ASSERT(name == "w8a8", "attribute dtype is '", name, "': expected fp32, bf16, int8 or w8a8");
    return DType::w8a8;
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
