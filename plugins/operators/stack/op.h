#pragma once

#include <cstring>

#include "../../cpu/openvino_op.h"

namespace redraft {

class Stack : public Operator {
  public:
    OPENVINO_OP("Stack", "redraft.cpu", ov::op::Op);
    using Operator::Operator;

    void validate_and_infer_types() override {
        const ov::PartialShape& part = get_input_partial_shape(0);
        for (std::size_t i = 0; i < get_input_size(); ++i) {
            expect_type(this, i, ov::element::f32);
            OPENVINO_ASSERT(get_input_partial_shape(i).rank() == 2 && get_input_partial_shape(i).compatible(part),
                            get_friendly_name(), ": input ", i, " has shape ", get_input_partial_shape(i), ": expected ",
                            part);
        }
        set_output_type(0, ov::element::f32, {part[0] * ov::Dimension(get_input_size()), part[1]});
    }
    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        auto copy = std::make_shared<Stack>(*this);
        copy->set_arguments(inputs);
        copy->validate_and_infer_types();
        return copy;
    }
    bool visit_attributes(ov::AttributeVisitor&) override { return true; }
    int64_t rows_factor() const override { return static_cast<int64_t>(get_input_size()); }
    void run(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const ov::Shape part = inputs[0].get_shape();
        outputs[0].set_shape({part[0] * inputs.size(), part[1]});
        for (std::size_t i = 0; i < inputs.size(); ++i) {
            OPENVINO_ASSERT(inputs[i].get_shape() == part, "input ", i, " of a stack has shape ", inputs[i].get_shape(),
                            ": expected ", part);
            for (std::size_t b = 0; b < part[0]; ++b)
                std::memcpy(outputs[0].data<float>() + (b * inputs.size() + i) * part[1],
                            inputs[i].data<const float>() + b * part[1], part[1] * sizeof(float));
        }
    }
};

}  // namespace redraft
