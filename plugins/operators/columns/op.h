#pragma once

#include "../../cpu/openvino_op.h"

namespace redraft {

class Columns : public Operator {
  public:
    OPENVINO_OP("Columns", "redraft.cpu", ov::op::Op);
    using Operator::Operator;

    void validate_and_infer_types() override {
        OPENVINO_ASSERT(get_input_size() == 2, get_friendly_name(), " has ", get_input_size(), " inputs: expected 2");
        expect_type(this, 0, ov::element::f32);
        expect_type(this, 1, ov::element::i32);
        OPENVINO_ASSERT(get_input_partial_shape(0).rank() == 2, get_friendly_name(), ": x has shape ",
                        get_input_partial_shape(0), ": expected [rows, features]");
        set_output_type(0, ov::element::f32, get_input_partial_shape(0));
    }
    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        auto copy = std::make_shared<Columns>(*this);
        copy->set_arguments(inputs);
        copy->validate_and_infer_types();
        return copy;
    }
    bool visit_attributes(ov::AttributeVisitor&) override { return true; }
    void run(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const ov::Shape shape = inputs[0].get_shape();
        const std::size_t features = shape[1];
        OPENVINO_ASSERT(inputs[1].get_size() == features, "columns has ", inputs[1].get_size(), " elements: expected ",
                        features);
        outputs[0].set_shape(shape);
        const float* x = inputs[0].data<const float>();
        const int32_t* columns = inputs[1].data<const int32_t>();
        for (std::size_t i = 0; i < features; ++i)
            OPENVINO_ASSERT(columns[i] >= 0 && static_cast<std::size_t>(columns[i]) < features, "columns has ",
                            columns[i], ": expected 0 to ", features - 1);
        float* out = outputs[0].data<float>();
        for (std::size_t r = 0; r < shape[0]; ++r)
            for (std::size_t i = 0; i < features; ++i) out[r * features + i] = x[r * features + columns[i]];
    }
};

}  // namespace redraft
