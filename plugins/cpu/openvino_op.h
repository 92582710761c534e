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
};

inline DType parse_dtype(const std::string& name) {
    if (name == "fp32") return DType::fp32;
    if (name == "bf16") return DType::bf16;
    if (name == "int8") return DType::int8;
    OPENVINO_ASSERT(name == "w8a8", "attribute dtype is '", name, "': expected fp32, bf16, int8 or w8a8");
    return DType::w8a8;
}

// The tensors behind the fixed inputs, named by the attribute `inputs`: "norm,residual" says that the
// next two are the norm weight and the residual. Names come in the order that `allowed` gives.
class OptionalInputs {
  public:
    OptionalInputs() = default;
    OptionalInputs(const std::string& names, const std::vector<std::string>& allowed, std::size_t first) {
        std::size_t next = 0;
        for (std::size_t start = 0; start < names.size();) {
            std::size_t comma = names.find(',', start);
            if (comma == std::string::npos) comma = names.size();
            const std::string name = names.substr(start, comma - start);
            start = comma + 1;
            while (next < allowed.size() && allowed[next] != name) ++next;
            OPENVINO_ASSERT(next < allowed.size(), "attribute inputs is '", names, "': '", name,
                            "' is unknown, repeated or out of order");
            names_.push_back(name);
            index_.push_back(first++);
        }
        end_ = first;
    }

    // Input number of `name`, or -1.
    int64_t find(const std::string& name) const {
        for (std::size_t i = 0; i < names_.size(); ++i)
            if (names_[i] == name) return static_cast<int64_t>(index_[i]);
        return -1;
    }
    std::size_t end() const { return end_; }

    template <class T>
    const T* data(const ov::TensorVector& inputs, const std::string& name) const {
        const int64_t i = find(name);
        return i < 0 ? nullptr : inputs[i].data<const T>();
    }

  private:
    std::vector<std::string> names_;
    std::vector<std::size_t> index_;
    std::size_t end_ = 0;
};

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
