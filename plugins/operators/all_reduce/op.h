#pragma once

#include "../../cpu/openvino_op.h"
#include "exchange.h"

namespace redraft {

class AllReduce : public Operator {
  public:
    OPENVINO_OP("AllReduce", "redraft", ov::op::Op);
    using Operator::Operator;

    void validate_and_infer_types() override {
        OPENVINO_ASSERT(get_input_size() == 1, get_friendly_name(), " has ", get_input_size(), " inputs: expected one");
        expect_type(this, 0, ov::element::f32);
        set_output_type(0, ov::element::f32, get_input_partial_shape(0));
    }
    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        auto copy = std::make_shared<AllReduce>(*this);
        copy->set_arguments(inputs);
        copy->validate_and_infer_types();
        return copy;
    }
    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("ranks", ranks_);
        return true;
    }
    void run(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        outputs[0].set_shape(inputs[0].get_shape());
        OPENVINO_ASSERT(rank_count() == ranks_, "the network is for ", ranks_, " ranks: ", rank_count(), " are connected");
        all_reduce(inputs[0].data<const float>(), static_cast<int64_t>(inputs[0].get_size()), outputs[0].data<float>());
    }

  private:
    int64_t ranks_ = 0;
};

}  // namespace redraft
