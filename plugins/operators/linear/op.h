#pragma once

#include "projection_op.h"

namespace redraft {

class Linear : public ProjectionOp {
  public:
    OPENVINO_OP("Linear", "redraft.cpu", ov::op::Op);
    using ProjectionOp::ProjectionOp;

    void validate_and_infer_types() override {
        kind_ = parse_activation(activation_);
        set_output_type(0, ov::element::f32, {check_projection(kind_), out_features_});
    }
    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        auto copy = std::make_shared<Linear>(*this);
        copy->set_arguments(inputs);
        copy->validate_and_infer_types();
        return copy;
    }
    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("activation", activation_);
        return ProjectionOp::visit_attributes(visitor);
    }
    void run(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const int64_t residual = optional_.find(kResidual);
        LinearArgs args{projection(inputs),
                        kind_,
                        optional_.data<float>(inputs, kResidual),
                        residual < 0 ? 0 : static_cast<int64_t>(inputs[residual].get_shape()[0]),
                        optional_.data<int32_t>(inputs, kResidualRows),
                        nullptr};
        outputs[0].set_shape({static_cast<std::size_t>(args.p.rows), static_cast<std::size_t>(out_features_)});
        args.out = outputs[0].data<float>();
        run_kernel(args);
    }

  private:
    static Activation parse_activation(const std::string& name) {
        if (name == "none") return Activation::none;
        if (name == "swiglu") return Activation::swiglu;
        if (name == "silu") return Activation::silu;
        if (name == "geglu") return Activation::geglu;
        if (name == "relu") return Activation::relu;
        OPENVINO_ASSERT(name == "silu_last", "attribute activation is '", name,
                        "': expected none, swiglu, geglu, silu, silu_last or relu");
        return Activation::silu_last;
    }
    std::string activation_ = "none";
    Activation kind_{};  // of activation_, parsed when the node is validated
};

}  // namespace redraft
