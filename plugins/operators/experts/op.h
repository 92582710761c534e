#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "../../cpu/openvino_op.h"

namespace redraft {

class Experts : public Operator {
  public:
    OPENVINO_OP("Experts", "redraft.cpu", ov::op::Op);
    using Operator::Operator;

    void validate_and_infer_types() override {
        gate_up_ = WeightStorage(dtype_);
        down_ = WeightStorage(down_dtype_);
        OPENVINO_ASSERT(activation_ == "swiglu" || activation_ == "geglu", "attribute activation is '", activation_,
                        "': expected swiglu or geglu");
        gate_ = activation_ == "swiglu" ? Activation::swiglu : Activation::geglu;
        OPENVINO_ASSERT(chosen_ >= 1 && chosen_ <= count_, "attribute chosen is ", chosen_, ": expected 1 to ", count_);
        OPENVINO_ASSERT(get_input_size() == kResidual || get_input_size() == kResidual + 1, get_friendly_name(), " has ",
                        get_input_size(), " inputs: expected x, router, two weights and, if any, residual");
        for (std::size_t i = 0; i < get_input_size(); ++i)
            expect_type(this, i, i == kGateUp || i == kDown ? ov::element::u8 : ov::element::f32);
        expect_elements(this, kGateUp, count_ * gate_up_bytes());
        expect_elements(this, kDown, count_ * down_bytes());
        const ov::PartialShape& x = get_input_partial_shape(0);
        OPENVINO_ASSERT(x.compatible({ov::Dimension::dynamic(), in_features_}), get_friendly_name(), ": x has shape ", x,
                        ": expected [rows, ", in_features_, "]");
        const ov::PartialShape& router = get_input_partial_shape(1);
        OPENVINO_ASSERT(router.compatible({ov::Dimension::dynamic(), count_}), get_friendly_name(),
                        ": router has shape ", router, ": expected [rows, ", count_, "]");
        set_output_type(0, ov::element::f32, {x.rank().is_static() ? x[0] : ov::Dimension::dynamic(), in_features_});
    }
    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        auto copy = std::make_shared<Experts>(*this);
        copy->set_arguments(inputs);
        copy->validate_and_infer_types();
        return copy;
    }
    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("count", count_);
        visitor.on_attribute("chosen", chosen_);
        visitor.on_attribute("normalized", normalized_);
        visitor.on_attribute("in_features", in_features_);
        visitor.on_attribute("columns", columns_);
        visitor.on_attribute("dtype", dtype_);
        visitor.on_attribute("down_dtype", down_dtype_);
        visitor.on_attribute("activation", activation_);
        return true;
    }
    void run(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const ov::Shape shape = inputs[0].get_shape();
        const int64_t rows = static_cast<int64_t>(shape[0]);
        OPENVINO_ASSERT(inputs[1].get_shape()[0] == shape[0], "the router has ", inputs[1].get_shape()[0],
                        " rows: expected ", rows);
        outputs[0].set_shape(shape);
        float* const out = outputs[0].data<float>();
        if (inputs.size() > kResidual) {
            OPENVINO_ASSERT(inputs[kResidual].get_shape() == shape, "the residual has another shape than x: ",
                            inputs[kResidual].get_shape(), ", expected ", shape);
            std::copy_n(inputs[kResidual].data<const float>(), rows * in_features_, out);
        } else {
            std::fill_n(out, rows * in_features_, 0.0f);
        }
        std::vector<Share> shares(count_);
        for (int64_t r = 0; r < rows; ++r) route(inputs[1].data<const float>() + r * count_, r, shares);
        std::vector<float> inner, each;
        for (int64_t e = 0; e < count_; ++e) {
            const Share& share = shares[e];
            const int64_t n = static_cast<int64_t>(share.rows.size());
            if (!n) continue;
            inner.resize(n * columns_);
            each.resize(n * in_features_);
            run_kernel(LinearArgs{
                {inputs[0].data<const float>(), rows, share.rows.data(), n, packed(inputs, kGateUp, e * gate_up_bytes()),
                 nullptr, nullptr, nullptr, 0.0f, in_features_, columns_, gate_up_.dtype, gate_up_.data(), gate_up_.count()},
                gate_, nullptr, 0, nullptr, inner.data()});
            run_kernel(LinearArgs{{inner.data(), n, nullptr, n, packed(inputs, kDown, e * down_bytes()), nullptr, nullptr,
                                   nullptr, 0.0f, columns_, in_features_, down_.dtype, down_.data(), down_.count()},
                                  Activation::none, nullptr, 0, nullptr, each.data()});
            for (int64_t i = 0; i < n; ++i) {
                float* const to = out + share.rows[i] * in_features_;
                for (int64_t k = 0; k < in_features_; ++k) to[k] += share.weights[i] * each[i * in_features_ + k];
            }
        }
    }

  private:
    static constexpr std::size_t kGateUp = 2, kDown = 3, kResidual = 4;  // which inputs they are

    // The rows that chose an expert, ascending, and its weight in each.
    struct Share {
        std::vector<int32_t> rows;
        std::vector<float> weights;
    };

    // Adds a row to the shares of the experts that it chooses.
    void route(const float* logits, int64_t row, std::vector<Share>& shares) const {
        const float largest = *std::max_element(logits, logits + count_);
        std::vector<float> chances(count_);
        float total = 0.0f, kept = 0.0f;
        for (int64_t e = 0; e < count_; ++e) total += chances[e] = std::exp(logits[e] - largest);
        std::vector<int64_t> best(chosen_);
        std::vector<bool> taken(count_);
        for (int64_t& choice : best) {
            choice = -1;
            for (int64_t e = 0; e < count_; ++e)
                if (!taken[e] && (choice < 0 || chances[e] > chances[choice])) choice = e;
            taken[choice] = true;
            kept += chances[choice];
        }
        for (int64_t choice : best) {
            shares[choice].rows.push_back(static_cast<int32_t>(row));
            shares[choice].weights.push_back(chances[choice] / (normalized_ ? kept : total));
        }
    }

    int64_t gate_up_bytes() const { return gate_up_.bytes(in_features_, columns_, gate_); }
    int64_t down_bytes() const { return down_.bytes(columns_, in_features_, Activation::none); }
    static const void* packed(const ov::TensorVector& inputs, std::size_t which, int64_t offset) {
        return static_cast<const char*>(inputs[which].data()) + offset;
    }

    int64_t count_ = 0, chosen_ = 0, normalized_ = 0, in_features_ = 0, columns_ = 0;
    std::string dtype_ = "fp32", down_dtype_ = "fp32", activation_ = "swiglu";
    WeightStorage gate_up_, down_;  // of dtype_ and down_dtype_, and
    Activation gate_{};      // of activation_, parsed when the node is validated
};

}  // namespace redraft
